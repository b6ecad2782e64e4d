// Constraints as data: the reasons for which a call violates one. Every type of constraint has one function.

import { besideKinds, tensorKinds } from "./kinds_tensors.js";
import {
  attentionKinds,
  convolutionKinds,
  expertsKinds,
  linearAttentionKinds,
  rotaryKinds,
  viewKinds,
} from "./kinds_shapes.js";
import { routingKinds } from "./kinds_routing.js";
import { valueKinds } from "./kinds_values.js";

const kinds = {
  ...tensorKinds,
  ...besideKinds,
  ...valueKinds,
  ...attentionKinds,
  ...rotaryKinds,
  ...expertsKinds,
  ...convolutionKinds,
  ...linearAttentionKinds,
  ...routingKinds,
  ...viewKinds,
};

// Returns {code, given, needed, fix, detail} for each violation; empty where the arguments meet the constraint.
export function reasonsOf(constraint, args) {
  const value = args[constraint.name];
  if (value === null && constraint.none_is_met) return [];
  const found = kinds[constraint.type](constraint, args, value, reasonsOf);
  return found.map(([given, needed, fix, code = constraint.code]) => reason(code, given, needed, fix));
}

export function reason(code, given, needed, fix, detail = `got ${given}, expected ${needed}`) {
  return { code, given, needed, fix, detail };
}
