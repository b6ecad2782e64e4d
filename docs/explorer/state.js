// The state of the page as texts, in the fragment of its address: op=..&device=..&x=8,512:float16&eps=1e-05&...
// Values are written as in Python; a text needs quotes only where it would be read as something else.

import { InvalidInput, Spec, float, repr, typeOf } from "./python.js";

export const SETTINGS = {
  op: "",
  device: "",
  capability: "",
  policy: "",
  fallback: "warn",
  adapt: "none",
  rows: "any",
  bandwidth: "1000",
};

export class State {
  constructor(settings, args) {
    Object.assign(this, { settings: { ...SETTINGS, ...settings }, args });
  }

  static read(fragment) {
    const all = Object.fromEntries(new URLSearchParams(fragment.replace(/^#/, "")));
    const isSetting = ([name]) => name in SETTINGS;
    const entries = Object.entries(all);
    const args = entries
      .filter((entry) => !isSetting(entry))
      .map(([name, value]) => [name.replace(/^arg\./, ""), value]);
    return new State(Object.fromEntries(entries.filter(isSetting)), Object.fromEntries(args));
  }

  // A parameter of an op that has the name of a setting is written as arg.NAME.
  fragment() {
    const settings = Object.entries(this.settings).filter(([name, value]) => value !== SETTINGS[name]);
    const args = Object.entries(this.args).map(([name, value]) => [name in SETTINGS ? `arg.${name}` : name, value]);
    const written = [...settings, ...args].map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
    return `#${written.join("&").replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("%40", "@")}`;
  }

  // The call for Explorer.explain. Throws InvalidInput for a text that cannot be read.
  call(data) {
    const { op, device, capability, policy, fallback, adapt, rows } = this.settings;
    if (!(op in data.ops)) throw new InvalidInput(unknown("op", op, Object.keys(data.ops)));
    const first = data.ops[op].parameters.find((each) => each.tensor);
    const beside = dtypeOf(this.args[first.name] ?? "") ?? first.dtype;
    const where = { device: device || "cpu", capability: versionOf(capability), beside };
    const names = data.ops[op].parameters.map((each) => each.name);
    const wrong = Object.keys(this.args).find((name) => !names.includes(name));
    if (wrong !== undefined) throw new InvalidInput(unknown(`argument of ${op}`, wrong, names));
    const given = data.ops[op].parameters.filter(({ name }) => name in this.args);
    const args = given.map((parameter) => [
      parameter.name,
      argument(parameter, this.args[parameter.name], where, data),
    ]);
    return { op, fallback, adapt, rows, order: orderOf(policy, op, data), args: Object.fromEntries(args) };
  }
}

function argument(parameter, written, where, data) {
  if (!parameter.tensor || written === "None") return literal(written);
  const number = parameter.number && !/[:,@]/.test(written) ? literal(written) : null;
  if (["int", "float"].includes(typeOf(number))) return number;
  const dtype = parameter.dtype_beside[where.beside] ?? parameter.dtype;
  return tensor(parameter.name, written, dtype, where, data);
}

const dtypeOf = (written) => written.match(/:([^@]*)/)?.[1];

// Reads sizes[:dtype][@device], as the command line does. Without a dtype it is that of the first tensor, where the
// argument may have that.
export function tensor(name, written, dtype, { device, capability }, data) {
  const [, sizes, kind = dtype, on = device] = written.match(/^([^:@]*)(?::([^@]*))?(?:@(.*))?$/) ?? [];
  const parts = sizes ? sizes.split(/[,x]/).map((size) => size.trim()) : [];
  if (sizes === undefined || !parts.every((size) => /^[0-9]{1,18}$/.test(size))) {
    throw new InvalidInput(`got ${name} ${repr(written)}, expected sizes; to fix: write them like 8,16,512,512`);
  }
  if (!(kind in data.dtypes)) {
    throw new InvalidInput(
      `got dtype ${repr(kind)} of ${name}, expected one of ${Object.keys(data.dtypes).join(", ")}`,
    );
  }
  return new Spec(parts.map(BigInt), kind, on, capability);
}

// Reads a value as Python writes it; a text without quotes is a text.
export function literal(written) {
  const trimmed = written.trim();
  if (trimmed === "None") return null;
  if (trimmed === "True" || trimmed === "False") return trimmed === "True";
  if (/^[-+]?[0-9]+$/.test(trimmed)) return BigInt(trimmed.replace("+", ""));
  if (/^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?$/i.test(trimmed)) return Number(trimmed);
  if (/^(-?inf|nan)$/.test(trimmed)) return float(trimmed);
  const tuple = trimmed.match(/^\((.*)\)$/)?.[1] ?? (trimmed.includes(",") ? trimmed : null);
  if (tuple !== null)
    return tuple
      .split(",")
      .filter((part) => part.trim())
      .map(literal);
  return trimmed.match(/^'(.*)'$/)?.[1] ?? trimmed;
}

export function written(value) {
  return typeof value === "string" && literal(value) === value ? value : repr(value);
}

function versionOf(text) {
  if (!text) return null;
  const parts = text.match(/^([0-9]{1,4})\.([0-9]{1,4})$/);
  if (!parts)
    throw new InvalidInput(`got compute capability ${repr(text)}, expected two numbers; to fix: write it like 9.0`);
  return parts.slice(1).map(BigInt);
}

// The order of a policy text for an op: "npu,triton; bias_gelu=eager"; null where it has none.
export function orderOf(policy, op, data) {
  const orders = {};
  for (const part of policy
    .split(";")
    .map((each) => each.trim())
    .filter(Boolean)) {
    const at = part.lastIndexOf("=");
    const about = part.slice(0, Math.max(at, 0)).trim();
    if (at >= 0 && !(about in data.ops)) throw new InvalidInput(unknown("op", about, Object.keys(data.ops)));
    if (about in orders) {
      throw new InvalidInput(
        `got ${repr(policy)}, which has two orders for ${about || "every op"}, expected one; ` +
          "to fix: join them with commas",
      );
    }
    orders[about] = part
      .slice(at + 1)
      .split(",")
      .map((name) => name.trim());
    const known = [...data.backends.map((each) => each.name), "auto"];
    for (const name of orders[about])
      if (!known.includes(name)) throw new InvalidInput(unknown("backend", name, known));
  }
  return orders[op] ?? orders[""] ?? null;
}

const unknown = (kind, name, known) =>
  `got ${kind} ${repr(name)}, expected one of ${known.join(", ")}; to fix: use one of these names`;
