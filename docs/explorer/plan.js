// The order in which backends are tried, and the calls that each one takes. The order is data; nothing is named here.

import { reason, reasonsOf } from "./constraints.js";
import { grower, paddingCost, withPaddingFix } from "./padding.js";

const notFor = (backend, device) => {
  const serves = backend.device_types.join(", ");
  return reason("device", device, serves, `move the tensors to ${serves}`, `serves ${serves}, not ${device}`);
};
const serves = (types, device) => types.includes("*") || types.includes(device);

export class Plan {
  // settings: {order, fallback, adapt, rows}, order a list of names or null; prefer: the backend that served forward.
  constructor(data, formulas, op, device, direction, settings, prefer = null) {
    Object.assign(this, { data, formulas, op, device, direction, settings });
    const isForward = direction === "forward";
    this.parameters = isForward ? op.parameters.map((each) => each.name) : op.backward_parameters;
    const named = (settings.order ?? []).slice(0, ((settings.order ?? []).indexOf("auto") + 1 || Infinity) - 1);
    const names = [...new Set([...named, ...data.backends.map((each) => each.name)])];
    this.backends = names.map((name) => this.planned(name, named.includes(name)));
    if (prefer !== null) this.backends.sort((a, b) => (b.backend === prefer) - (a.backend === prefer));
    this.serving =
      settings.fallback === "raise" ? this.withoutFallback(prefer) : this.backends.filter((b) => !b.refusal);
  }

  planned(name, named) {
    const backend = this.data.backends.find((each) => each.name === name);
    const optional = backend.optional && !named;
    if (!serves(backend.device_types, this.device)) {
      return { backend: name, named, optional: false, kernel: null, refusal: notFor(backend, this.device) };
    }
    const kernel = this.kernelOf(name);
    const refusal = kernel === null ? this.noKernel(backend) : this.dependsOnRows(kernel);
    return { backend: name, named, optional, kernel, refusal, grow: kernel && grower(this.op, kernel, this.formulas) };
  }

  kernelOf(name) {
    const takes = (each) =>
      each.backend === name &&
      each.direction === this.direction &&
      (!each.device_types.length || serves(each.device_types, this.device));
    return this.op.kernels.find(takes) ?? null;
  }

  noKernel(backend) {
    const what = this.direction === "forward" ? this.op.name : `${this.op.name} ${this.direction}`;
    const others = this.data.backends.filter(
      (each) => serves(each.device_types, this.device) && this.kernelOf(each.name),
    );
    const names = others.map((each) => each.name).join(" or ");
    const fix = names ? `prefer ${names}` : `register a backend with a kernel for ${what}`;
    const have = backend.ops.join(", ") || "no op";
    return reason("no-kernel", `kernels for ${have}`, `one for ${what}`, fix, `has no kernel for ${what}`);
  }

  // Why a row's results may depend on other rows, as text; null where they do not.
  whyRowsDepend({ why_rows_depend: why }) {
    return this.device in why ? why[this.device] : why["*"];
  }

  dependsOnRows(kernel) {
    const why = this.whyRowsDepend(kernel);
    if (this.settings.rows !== "independent" || why === null) return null;
    const isIndependent = (each) => {
      const other = serves(each.device_types, this.device) ? this.kernelOf(each.name) : null;
      return other !== null && this.whyRowsDepend(other) === null;
    };
    const names = this.data.backends.filter(isIndependent).map((each) => each.name);
    const fix = names.length ? `prefer ${names.join(" or ")}` : 'allow this op with rows="any"';
    const needed = "a kernel whose results do not depend on other rows";
    return reason("rows", why, needed, fix, `its results depend on the number of rows: ${why}`);
  }

  // What a kernel asks of a call: not what is for speed alone, where a row's results must not depend on other rows.
  constraintsOf({ constraints, for_speed: forSpeed }) {
    return this.settings.rows === "independent" ? constraints : [...constraints, ...forSpeed];
  }

  // What fallback="raise" allows: the first named backend (else the first) for the device, and optional ones before it.
  withoutFallback(prefer) {
    const isSilent = ({ named, optional, refusal }) =>
      refusal?.code === "device" || (!named && (optional || ["no-kernel", "rows"].includes(refusal?.code)));
    const first = [(b) => b.backend === prefer, (b) => b.named, () => true]
      .map((test) => this.backends.filter(test))
      .find((some) => some.length);
    const serving = [];
    for (const each of first[0].optional ? this.backends : first) {
      if (!each.refusal) serving.push(each);
      if (!(each.refusal ? isSilent(each) : each.optional)) break;
    }
    return serving;
  }

  named(args) {
    return Object.fromEntries(this.parameters.map((name, at) => [name, args[at]]));
  }

  takes(planned, args) {
    const named = this.named(args);
    return this.constraintsOf(planned.kernel).every((constraint) => !reasonsOf(constraint, named).length);
  }

  // The arguments with which a backend's kernel serves the call: as they are, or padded; null where it refuses.
  served(planned, args) {
    if (this.takes(planned, args)) return { args, padded: false };
    if (this.settings.adapt !== "pad" || !planned.grow) return null;
    const after = planned.grow(args) ?? args;
    return this.takes(planned, after) ? { args: after, padded: true } : null;
  }

  // The backend that serves the call, or null.
  select(args) {
    return this.serving.find((planned) => this.served(planned, args) !== null)?.backend ?? null;
  }

  // True for a backend of another device, or without a kernel for the op, that the policy does not name.
  isOther({ named, refusal }) {
    return !named && ["device", "no-kernel"].includes(refusal?.code);
  }

  // One backend's reasons to refuse the call, its deviations, and the adaptations that the call needs.
  about(planned, args) {
    if (planned.refusal) return { reasons: [planned.refusal], deviations: [], adaptations: [] };
    const { deviations, adaptations } = planned.kernel;
    const call = this.served(planned, args);
    if (call === null) {
      const named = this.named(args);
      const found = this.constraintsOf(planned.kernel).flatMap((constraint) => reasonsOf(constraint, named));
      return {
        reasons: withPaddingFix(found, planned.kernel, this.parameters, args, planned.grow),
        deviations,
        adaptations: [],
      };
    }
    const costs = adaptations.map(({ name, sentence, cost }) => ({
      name,
      sentence,
      bytes: this.formulas.call(cost, call.args),
    }));
    const needed = costs.filter((each) => each.bytes !== null);
    if (call.padded) needed.unshift(paddingCost(args, call.args, this.formulas));
    return { reasons: [], deviations, adaptations: needed.map((each) => ({ ...each, direction: this.direction })) };
  }
}
