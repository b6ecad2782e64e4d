// Formulas: small Python functions as nested lists, written by formulas.py.

import { InvalidInput, Spec, arithmetic, compare, prod, shown, slice, text, truth, typeOf } from "./python.js";

export class Formulas {
  constructor(functions, dtypes, promotions) {
    Object.assign(this, { functions, dtypes, promotions });
  }

  call(name, args) {
    const { parameters, rest, body } = this.functions[name];
    const names = Object.fromEntries(parameters.map((parameter, at) => [parameter, args[at]]));
    if (rest !== null) names[rest] = args.slice(parameters.length);
    const result = this.run(body, names);
    return result === undefined ? null : result.value;
  }

  // Returns {value} where a statement returned, else undefined.
  run(statements, names) {
    for (const [kind, ...parts] of statements) {
      if (kind === "return") return { value: this.value(parts[0], names) };
      if (kind === "raise") throw new InvalidInput(this.value(parts[0], names));
      if (kind === "let") assign(parts[0], this.value(parts[1], names), names);
      else if (kind === "when") {
        const result = this.run(truth(this.value(parts[0], names)) ? parts[1] : parts[2], names);
        if (result !== undefined) return result;
      } else throw new Error(`a formula reached what is for real tensors, ${parts[0]}`);
    }
    return undefined;
  }

  value([kind, ...parts], names) {
    const of = (node) => this.value(node, names);
    switch (kind) {
      case "const":
        return parts[0];
      case "var":
        return names[parts[0]];
      case "attribute":
        return this.attribute(of(parts[0]), parts[1]);
      case "method":
        return this.method(of(parts[0]), parts[1], parts[3], of);
      case "item":
        return of(parts[0]).at(Number(of(parts[1])));
      case "slice":
        return slice(of(parts[0]), of(parts[1]), of(parts[2]));
      case "tuple":
        return this.items(parts, of);
      case "dict":
        return Object.fromEntries(parts.map(([key, node]) => [key, of(node)]));
      case "text":
        return parts.map((node) => text(of(node))).join("");
      case "if":
        return of(truth(of(parts[0])) ? parts[1] : parts[2]);
      case "not":
        return !truth(of(parts[0]));
      case "and":
      case "or":
        return this.either(kind, parts, of);
      case "binary":
        return arithmetic(parts[0], of(parts[1]), of(parts[2]));
      case "compare":
        return this.comparison(parts, of);
      case "is":
        return parts[1].includes(typeOf(of(parts[0])));
      case "each":
        return this.each(parts, names);
      case "call":
        return this.call(parts[0], this.items(parts.slice(1), of));
      case "intrinsic":
        return this.intrinsic(parts[0], this.items(parts.slice(1), of));
    }
    throw new Error(`no expression ${kind}`);
  }

  items(nodes, of) {
    return nodes.flatMap((node) => (node[0] === "star" ? of(node[1]) : [of(node)]));
  }

  either(kind, parts, of) {
    let value;
    for (const node of parts) {
      value = of(node);
      if (truth(value) === (kind === "or")) break;
    }
    return value;
  }

  comparison([first, ...pairs], of) {
    let left = of(first);
    for (const [operator, node] of pairs) {
      const right = of(node);
      if (!compare(operator, left, right)) return false;
      left = right;
    }
    return true;
  }

  each([target, source, keep, result], names) {
    const values = [];
    for (const item of this.value(source, names)) {
      const inner = { ...names };
      assign(target, item, inner);
      if (keep === null || truth(this.value(keep, inner))) values.push(this.value(result, inner));
    }
    return values;
  }

  attribute(value, name) {
    if (value instanceof Spec && name in value) return value[name];
    if (name === "itemsize") return this.dtypes[value].itemsize;
    if (name === "is_floating_point") return this.dtypes[value].floating;
    throw new Error(`no attribute ${name}`);
  }

  method(value, name, named, of) {
    if (name === "dim") return BigInt(value.shape.length);
    if (name === "numel") return prod(value.shape);
    if (name === "replace") return value.replace(Object.fromEntries(named.map(([key, node]) => [key, of(node)])));
    throw new Error(`no method ${name}`);
  }

  intrinsic(name, args) {
    switch (name) {
      case "prod":
        return prod(args[0]);
      case "sum":
        return args[0].reduce((total, item) => arithmetic("+", total, item), 0n);
      case "min":
      case "max":
        return least(name === "min" ? "<" : ">", args.length === 1 ? args[0] : args);
      case "len":
        return BigInt(args[0].length);
      case "range":
        return Array.from({ length: Math.max(0, Number(args[0])) }, (_, at) => BigInt(at));
      case "abs":
        return compare("<", args[0], 0n) ? -args[0] : args[0];
      case "bool":
        return truth(args[0]);
      case "int":
        return typeOf(args[0]) === "float" ? BigInt(Math.trunc(args[0])) : BigInt(args[0]);
      case "float":
        return Number(args[0]);
      case "tuple":
        return args[0];
      case "shown":
        return shown(args[0]);
      case "is_tensor":
        return args[0] instanceof Spec;
      case "spec":
        return new Spec(...args);
      case "promote_types":
        return this.promotions[args.join()];
    }
    throw new Error(`no function ${name}`);
  }
}

function least(operator, values) {
  return values.reduce((best, value) => (compare(operator, value, best) ? value : best));
}

function assign(target, value, names) {
  if (typeof target === "string") {
    names[target] = value;
    return;
  }
  const star = target.findIndex((each) => typeof each === "object" && "star" in each);
  if (star < 0) target.forEach((each, at) => assign(each, value[at], names));
  else {
    const after = target.length - star - 1;
    target.slice(0, star).forEach((each, at) => assign(each, value[at], names));
    assign(target[star].star, value.slice(star, value.length - after), names);
    target.slice(star + 1).forEach((each, at) => assign(each, value[value.length - after + at], names));
  }
}
