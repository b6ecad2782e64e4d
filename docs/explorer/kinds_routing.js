// Positive integers beside other arguments: a divisor of a size, and the sizes of a routing of experts.

import { equal, repr, shown, typeOf } from "./python.js";
import { rank } from "./kinds_tensors.js";

const isPositive = (value) => typeOf(value) === "int" && value > 0n;

// A positive integer that fits beside other arguments; of other values another constraint is.
const size = (fits, needed) => (c, args, given) => {
  if (!isPositive(given) || fits(given, args)) return [];
  const text = needed(args);
  return [[`${c.name} = ${shown(given)}`, text, `pass ${c.name} as ${text}`]];
};

const expertsOf = ({ logits }) => (rank(logits) ? logits.shape.at(-1) : 0n);

function most(args) {
  const [experts, { groups, top_groups: top }] = [expertsOf(args), args];
  if (!isPositive(groups) || !isPositive(top) || (groups === 1n && top === 1n)) return experts;
  const members = (experts / groups) * top;
  return members < experts ? members : experts;
}

const lastSize = (spec) => (rank(spec) ? spec.shape.at(-1) : 1n);

export const routingKinds = {
  Divisor(c, args, given) {
    const other = args[c.other];
    const fits = (value) => value === 1n || !rank(other) || other.shape.at(-1) % value === 0n;
    return size(fits, () => `a divisor of the last size of ${c.other}, ${lastSize(other)}`)(c, args, given);
  },

  ChoiceCount: size(
    (k, args) => k <= most(args),
    (args) => `an integer from 1 to ${most(args)}, the experts that may be chosen`,
  ),

  GroupCount: size(
    (groups, args) => {
      if (groups === 1n || !rank(args.logits)) return true;
      const [experts, least] = [expertsOf(args), args.group_score === "top2" ? 2n : 1n];
      return experts % groups === 0n && experts >= least * groups;
    },
    (args) => {
      const least = args.group_score === "top2" ? " that leaves at least 2 in a group" : "";
      return `1, or a divisor of ${expertsOf(args)}${least}`;
    },
  ),

  TopGroupCount: size(
    (top, { groups }) => typeOf(groups) !== "int" || top <= groups,
    ({ groups }) => `an integer from 1 to groups, ${groups}`,
  ),

  GroupsFit(c, args, groups) {
    if (groups === 1n || groups === args.top_groups) return [];
    const width = expertsOf(args) / groups;
    if (width >= 3n && groups * ((width + 31n) / 32n) * 32n <= 2048n) return [];
    const needed = "groups of at least 3, at most 2048 once each is filled up to a multiple of 32";
    return [[`${groups} groups of ${width} experts`, needed, "use fewer groups, or another backend"]];
  },

  IndexFits(c, args, spec) {
    const [other, k] = [args[c.other], args.k];
    if (other === null) return [];
    const needed = [...other.shape.slice(0, -1), k];
    if (rank(other) && equal(spec.shape, needed)) return [];
    const text = `the shape of ${c.other}, with k in its last dim, ${repr(needed)}`;
    return [[`${c.name} of shape ${repr(spec.shape)}`, text, `pass k experts for each row of ${c.other}`]];
  },
};
