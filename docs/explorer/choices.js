// What the form offers: cases as states, devices, dtypes.

import { State, written } from "./state.js";

// The state of a call of an op: one of its cases, with the dtype and settings of the state before.
export function stateOf(op, chosen, before) {
  const args = {};
  for (const { name, tensor, required, dtype, default: standard } of op.parameters) {
    const value = chosen.args[name];
    if (tensor && value !== undefined && value !== null) {
      const sizes = Array.isArray(value) ? value.join(",") : "1";
      args[name] = chosen.tensors.includes(name) ? `${sizes}:${dtype}` : written(value);
    } else if (value !== undefined) args[name] = written(value);
    else if (tensor && !required) args[name] = "None";
    else if (standard !== null) args[name] = written(standard);
  }
  return new State({ ...before.settings, op: op.name }, args);
}

export function devicesOf(data) {
  const named = data.backends.flatMap((backend) => backend.device_types).filter((type) => type !== "*");
  return [...new Set([...[...new Set(named)].sort(), "meta", "mps", "xpu"])]; // of torch: eager serves them
}

export function floating(op, state, data) {
  const isFloating = ({ name, tensor, dtype }) =>
    tensor && state.args[name]?.includes(":") && data.dtypes[dtype].floating;
  return op.parameters.filter(isFloating).map(({ name }) => name);
}

export function withDtype(state, op, data, dtype) {
  const changed = floating(op, state, data).map((name) => [name, state.args[name].replace(/:[^@]*/, `:${dtype}`)]);
  return new State(state.settings, { ...state.args, ...Object.fromEntries(changed) });
}

// Does a kernel for the device have a constraint on compute capability?
export function asksCapability(op, device, data) {
  const types = ({ type, condition, then }) => [type, ...[condition, then].filter(Boolean).flatMap(types)];
  const devices = ({ backend, device_types: own }) =>
    own.length ? own : data.backends.find(({ name }) => name === backend).device_types;
  return op.kernels.some(
    (kernel) => devices(kernel).includes(device) && kernel.constraints.flatMap(types).includes("Capability"),
  );
}

// Sizes that a tensor may have: in the cases, and those of the call's other tensors, whole, their last and their first.
export function sizesNear(op, name, state) {
  const cases = op.cases.map((each) => each.args[name]).filter(Array.isArray);
  const others = op.parameters.filter(({ tensor }) => tensor).map((each) => state.args[each.name] ?? "None");
  const shapes = others.filter((text) => text !== "None").map((text) => text.replace(/[:@].*/, "").split(","));
  const near = shapes.flatMap((sizes) => [sizes, sizes.slice(-1), sizes.slice(0, 1), sizes.slice(0, -1)]);
  return [...near, ...cases, ["1"]].map((sizes) => sizes.join(","));
}
