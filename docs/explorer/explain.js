// explain: the decision for a call, as fusedops.explain returns it, and the decision for its gradient.

import { reasonsOf } from "./constraints.js";
import { Formulas } from "./formulas.js";
import { Plan } from "./plan.js";
import { InvalidInput, Spec, decoded, general, text } from "./python.js";

export class Explorer {
  constructor(json) {
    this.data = decoded(json);
    this.formulas = new Formulas(this.data.formulas, this.data.dtypes, this.data.promotions);
  }

  // call: {op, args by name, order, fallback, adapt, rows}. Returns {error} for a call that is invalid on every backend.
  explain(call) {
    const op = this.data.ops[call.op];
    let args = op.parameters.map(({ name, default: value }) => (name in call.args ? call.args[name] : value));
    try {
      if (op.prepare_args !== null) args = this.formulas.call(op.prepare_args, [args]);
    } catch (error) {
      if (!(error instanceof InvalidInput)) throw error;
      return { error: error.message };
    }
    const named = Object.fromEntries(op.parameters.map(({ name }, at) => [name, args[at]]));
    for (const condition of op.conditions) {
      const [first] = reasonsOf(condition, named);
      if (first) return { error: `${op.name}: ${first.detail}; to fix: ${first.fix}`, reason: first };
    }
    args = args.map((value, at) =>
      op.float_indices.includes(BigInt(at)) && typeof value === "bigint" ? Number(value) : value,
    );
    return this.decide(op, args, call);
  }

  decide(op, args, settings) {
    const plan = (direction, prefer) =>
      new Plan(this.data, this.formulas, op, args[0].deviceType, direction, settings, prefer);
    const forward = plan("forward", null);
    const backend = forward.select(args);
    const backward = backend === null ? null : plan("backward", backend);
    const standIn = backward && this.standIn(op, args);
    const then = backward && backward.select(standIn);
    const ofBackward = backward ? candidates(backward, standIn, then) : [];
    const ofForward = candidates(forward, args, backend);
    for (const each of ofForward) each.backward = ofBackward.find((other) => other.backend === each.backend) ?? null;
    return {
      op: op.name,
      given: op.parameters.map(({ name }, at) => `${name} ${valueText(args[at])}`).join(", "),
      backend,
      backward: then,
      candidates: ofForward,
      bytes: this.formulas.call(op.min_bytes, args),
    };
  }

  // Arguments of backward before forward has run: the first argument stands for outputs and their gradients.
  standIn(op, args) {
    const named = Object.fromEntries(op.parameters.map(({ name }, at) => [name, args[at]]));
    const dtype = op.output_dtype === null ? args[0].dtype : this.formulas.call(op.output_dtype, args);
    const output = args[0].replace({ dtype });
    const others = { needs: [], reuse: false };
    return op.backward_parameters.map((name) => {
      if (op.grads.includes(name)) return output;
      if (name in named) return named[name];
      if (op.outputs.includes(name)) return output;
      if (op.saved.includes(name)) return null;
      return name in others ? others[name] : named[name.replace(/_dtype$/, "")].dtype;
    });
  }
}

function candidates(plan, args, selected) {
  return plan.backends.map((planned) => {
    const about = plan.about(planned, args);
    const status = about.reasons.length ? "refused" : planned.backend === selected ? "selected" : "eligible";
    return { backend: planned.backend, status, isOther: plan.isOther(planned), ...about };
  });
}

function valueText(value) {
  if (value instanceof Spec) return String(value);
  return typeof value === "number" ? general(value) : text(value);
}
