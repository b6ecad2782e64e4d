// Values as Python has them: an int is a BigInt, a float a number, a tuple an array, a tensor a Spec, None null.

export class Spec {
  constructor(shape, dtype, device, capability = null) {
    Object.assign(this, { shape, dtype, device, capability });
  }

  replace(changes) {
    return Object.assign(new Spec(this.shape, this.dtype, this.device, this.capability), changes);
  }

  get deviceType() {
    return this.device.split(":")[0];
  }

  toString() {
    return `${this.dtype}[${this.shape.join(", ")}] on ${this.device}`;
  }
}

export class InvalidInput extends Error {}

export function typeOf(value) {
  if (value === null) return "NoneType";
  if (Array.isArray(value)) return "tuple";
  if (value instanceof Spec) return "spec";
  return { bigint: "int", number: "float", boolean: "bool", string: "str" }[typeof value];
}

// JSON has one kind of number: its integers are ints, and a float is {"float": text}.
export function decoded(value) {
  if (typeof value === "number") return BigInt(value);
  if (Array.isArray(value)) return value.map(decoded);
  if (value === null || typeof value !== "object") return value;
  if (Object.keys(value).join() === "float") return float(value.float);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, decoded(item)]));
}

export function float(text) {
  return { inf: Infinity, "-inf": -Infinity, nan: NaN }[text] ?? Number(text);
}

export const isNumber = (value) => ["int", "float", "bool"].includes(typeOf(value));

const whole = (value) => (typeof value === "boolean" ? BigInt(value) : value);

// Two numbers for arithmetic: an int beside a float becomes one.
function pair(a, b) {
  const [x, y] = [whole(a), whole(b)];
  return typeof x === typeof y ? [x, y] : [Number(x), Number(y)];
}

export function arithmetic(operator, a, b) {
  if (operator === "+" && Array.isArray(a)) return [...a, ...b];
  if (operator === "*" && Array.isArray(a))
    return Array(Math.max(0, Number(b)))
      .fill(a)
      .flat();
  const [x, y] = pair(a, b);
  switch (operator) {
    case "+":
      return x + y;
    case "-":
      return x - y;
    case "*":
      return x * y;
    case "/":
      return Number(x) / Number(y);
    case "**":
      return x ** y;
    case "//":
      return floor(x, y);
    case "%":
      return x - floor(x, y) * y;
  }
  throw new Error(`no operator ${operator}`);
}

function floor(x, y) {
  if (typeof x === "number") return Math.floor(x / y);
  const quotient = x / y;
  return quotient * y !== x && x < 0n !== y < 0n ? quotient - 1n : quotient;
}

export function equal(a, b) {
  if (Array.isArray(a) || Array.isArray(b)) {
    return Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((each, at) => equal(each, b[at]));
  }
  if (isNumber(a) && isNumber(b)) return whole(a) == whole(b); // exact, also for an int beside a float
  if (a instanceof Spec && b instanceof Spec) {
    return equal(a.shape, b.shape) && a.dtype === b.dtype && a.device === b.device;
  }
  return a === b;
}

const less = (a, b) => whole(a) < whole(b);

export function compare(operator, a, b) {
  switch (operator) {
    case "is":
      return typeOf(a) === typeOf(b) && equal(a, b);
    case "is not":
      return !compare("is", a, b);
    case "==":
      return equal(a, b);
    case "!=":
      return !equal(a, b);
    case "in":
      return b.some((each) => equal(a, each));
    case "not in":
      return !compare("in", a, b);
  }
  if (Array.isArray(a)) {
    const at = a.findIndex((each, place) => place >= b.length || !equal(each, b[place]));
    if (at >= 0 && at < b.length) return compare(operator, a[at], b[at]);
    [a, b] = [BigInt(a.length), BigInt(b.length)];
  }
  switch (operator) {
    case "<":
      return less(a, b);
    case ">":
      return less(b, a);
    case "<=":
      return less(a, b) || equal(a, b);
    case ">=":
      return less(b, a) || equal(a, b);
  }
  throw new Error(`no comparison ${operator}`);
}

export function truth(value) {
  return Array.isArray(value) ? value.length > 0 : Boolean(value);
}

export const prod = (sizes) => sizes.reduce((product, size) => product * size, 1n);

export function slice(values, start, stop) {
  return values.slice(start === null ? 0 : Number(start), stop === null ? undefined : Number(stop));
}

// ------------------------------------------------------------------------------------------------------------ texts

export function repr(value) {
  switch (typeOf(value)) {
    case "NoneType":
      return "None";
    case "bool":
      return value ? "True" : "False";
    case "int":
      return String(value);
    case "float":
      return floatText(value);
    case "tuple":
      return `(${value.map(repr).join(", ")}${value.length === 1 ? "," : ""})`;
    case "str":
      return value.includes("'") && !value.includes('"')
        ? `"${value}"`
        : `'${value.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
  }
  return String(value);
}

export const text = (value) => (typeof value === "string" ? value : repr(value));

// A value for a message: Python's reprlib cuts long texts, and integers beyond 64 bits are described.
export function shown(value) {
  if (value instanceof Spec) return `TensorSpec(${repr(value.shape)}, torch.${value.dtype}, ${repr(value.device)})`;
  if (typeof value === "bigint") {
    const bits = (value < 0n ? -value : value).toString(2).length;
    return bits > 64 ? `an integer of ${bits} bits` : String(value);
  }
  if (Array.isArray(value) && value.length > 6) return `(${value.slice(0, 6).map(shown).join(", ")}, ...)`;
  if (typeof value !== "string" || repr(value).length <= 30) return repr(value);
  const [head, tail] = [repr(value.slice(0, 30)), repr(value.slice(-30))];
  return `${head.slice(0, 13)}...${tail.slice(-14)}`;
}

// repr() of a float: an exponent below 1e-4 and from 1e16 on, of at least two digits.
function floatText(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (Object.is(value, -0)) return "-0.0";
  const [digits, power] = value.toExponential().split("e");
  if (Number(power) < -4 || Number(power) >= 16) return withExponent(digits, Number(power));
  const plain = fixed(digits, Number(power));
  return plain.includes(".") ? plain : `${plain}.0`;
}

// format(value, "g"): six significant digits, trailing zeros cut.
export function general(value) {
  if (!Number.isFinite(value)) return floatText(value);
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const [digits, power] = value.toExponential(5).split("e");
  const cut = digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
  return Number(power) < -4 || Number(power) >= 6 ? withExponent(cut, Number(power)) : fixed(cut, Number(power));
}

function withExponent(digits, power) {
  return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

// The number of these digits and this power of ten, without an exponent.
function fixed(digits, power) {
  const sign = digits.startsWith("-") ? "-" : "";
  const all = digits.replace("-", "").replace(".", "");
  if (power < 0) return `${sign}0.${"0".repeat(-power - 1)}${all}`;
  const whole = all.slice(0, power + 1).padEnd(power + 1, "0");
  const rest = all.slice(power + 1);
  return rest ? `${sign}${whole}.${rest}` : sign + whole;
}

export function listed(values, word = "or") {
  return values.length === 1 ? values[0] : `${values.slice(0, -1).join(", ")} ${word} ${values.at(-1)}`;
}
