// Padding, adapt="pad": a call that a kernel refuses for a size that is no multiple is made larger.

import { reasonsOf } from "./constraints.js";
import { ceil } from "./kinds_tensors.js";
import { Spec, equal, prod } from "./python.js";

const PAD = "padded to sizes that the kernel takes, with the added part masked out, and the result cropped";

// Returns a function that pads the arguments of a kernel, null for a call that padding does not change; null where no
// constraint asks for a multiple.
export function grower(op, kernel, formulas) {
  const { padding } = op;
  if (padding === null) return null;
  const isForward = kernel.direction === "forward";
  // the tensors that have the first parameter's sizes
  const names = isForward ? [op.parameters[0].name] : [...op.grads, ...op.outputs];
  const rules = kernel.constraints.filter((each) => each.type === "Dim" && names.includes(each.name));
  const steps = padding.dims.map((dim) => stepOf(rules.filter((each) => each.dims.includes(dim))));
  if (steps.every((step) => step === null)) return null;
  const pad = isForward ? padding.forward : padding.backward;
  return (args) => {
    const given = padding.dims.map((dim) => args[0].shape.at(Number(dim)));
    const sizes = given.map((size, at) => grown(size, steps[at]));
    return equal(sizes, given) || args[0].shape.includes(0n) ? null : formulas.call(pad, [args, sizes]);
  };
}

function grown(size, step) {
  return step === null ? size : ceil(size > step.least ? size : step.least, step.multiple);
}

function stepOf(rules) {
  const multiples = rules.map((each) => each.multiple_of).filter((each) => each !== null);
  if (!multiples.length) return null;
  const least = rules.map((each) => each.at_least ?? 1n).reduce((a, b) => (a > b ? a : b));
  return { multiple: multiples.reduce(lcm), least };
}

const gcd = (a, b) => (b === 0n ? a : gcd(b, a % b));
const lcm = (a, b) => (a / gcd(a, b)) * b;

// The bytes of the padded copies of the tensors, and of the result before it is cropped.
export function paddingCost(before, after, formulas) {
  const copies = after.filter((each, at) => each instanceof Spec && !equal(each, before[at]));
  const bytes = (spec) => prod(spec.shape) * formulas.dtypes[spec.dtype].itemsize;
  return { name: "pad", sentence: PAD, bytes: [...copies, after[0]].map(bytes).reduce((a, b) => a + b) };
}

// The reasons of a refusal; where padding would help, the last one's fix mentions it.
export function withPaddingFix(reasons, kernel, parameters, args, grow) {
  const after = grow === null || !reasons.length ? null : grow(args);
  if (after === null) return reasons;
  const named = Object.fromEntries(parameters.map((name, at) => [name, after[at]]));
  if (kernel.constraints.some((constraint) => reasonsOf(constraint, named).length)) return reasons;
  const last = reasons.at(-1);
  return [...reasons.slice(0, -1), { ...last, fix: `${last.fix}, or allow adapt="pad"` }];
}
