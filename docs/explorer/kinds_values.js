// Constraints on arguments that are no tensors, on presence, and those that hold on a condition.

import { compare, general, isNumber, listed, repr, shown, typeOf } from "./python.js";
import { rule } from "./kinds_tensors.js";

const LONG = 2n ** 63n;
const MAX = 2 ** 128 - 2 ** 104; // float32's largest
const isLong = (value) => typeOf(value) === "bool" || (typeOf(value) === "int" && -LONG <= value && value < LONG);
const isExactLong = (value) => typeOf(value) === "int" && isLong(value);

// A constraint that accepts some values; the others are refused with its rule.
const value =
  (accepts, fix = (c, needed) => `pass ${c.name} as ${needed}`) =>
  (c, args, given) => {
    if (accepts(c, given)) return [];
    const needed = rule(c);
    return [[`${c.name} = ${shown(given)}`, needed, fix(c, needed, given)]];
  };

export const valueKinds = {
  PlainFloat() {
    return []; // an int is converted
  },

  Flag: value(
    (c, given) => typeOf(given) === "bool",
    (c) => `pass bool(${c.name})`,
  ),
  OneOf: value((c, given) => ["str", "int"].includes(typeOf(given)) && compare("in", given, c.choices)),
  Integer: value((c, given) => isExactLong(given)),
  Count: value((c, given) => (given === null ? c.optional : isExactLong(given) && given > 0n)),
  Probability: value((c, given) => isNumber(given) && compare(">=", given, 0n) && compare("<=", given, 1n)),

  Finite: value(
    (c, given) => {
      if (given === null) return c.optional;
      const low = c.at_least ?? -MAX;
      if (typeOf(given) === "float") return low <= given && given <= MAX;
      return isLong(given) && compare(">=", given, low);
    },
    (c, needed, given) => (typeOf(given) === "spec" ? `use ${c.name}.item()` : `pass ${c.name} as ${needed}`),
  ),

  Scalar: value((c, given) => {
    const most = c.abs_at_most;
    if (most !== null && !(isNumber(given) && compare("<=", -most, given) && compare("<=", given, most))) return false;
    return c.one_of === null || compare("in", given, c.one_of);
  }),

  Present(c, args, given) {
    if ((given !== null) === c.present) return [];
    const needed = `${c.present ? "a" : "no"} ${c.name}`;
    return [[c.present ? `${c.name} = None` : `a ${c.name}`, needed, c.fix || `call it with ${needed}`]];
  },

  When(c, args, given, reasonsOf) {
    if (reasonsOf(c.condition, args).length) return [];
    const suffix = ` (with ${c.condition.phrase})`;
    return reasonsOf(c.then, args).map(({ given: has, needed, fix, code }) => [has, needed + suffix, fix, code]);
  },
};
