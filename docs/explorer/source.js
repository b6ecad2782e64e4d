// The call as text to copy: Python, and the command line.

import { Spec, repr, text } from "./python.js";

export function python(call, op) {
  const tensor = ({ shape, dtype, device, capability }) =>
    `TensorSpec(${repr(shape)}, torch.${dtype}, ${quoted(device)}${capability ? `, ${repr(capability)}` : ""})`;
  const value = (each) => {
    if (each instanceof Spec) return tensor(each);
    if (typeof each === "number" && !Number.isFinite(each)) return `float("${repr(each)}")`;
    return repr(each).replace(/^'(.*)'$/, '"$1"');
  };
  const args = op.parameters
    .filter(({ name }) => name in call.args)
    .map(({ name }) => `    ${name}=${value(call.args[name])},`);
  const settings = [
    ...(call.fallback === "warn" ? [] : [`fallback=${quoted(call.fallback)}`]),
    ...(call.adapt === "none" ? [] : [`adapt=${quoted(call.adapt)}`]),
    ...(call.rows === "any" ? [] : [`rows=${quoted(call.rows)}`]),
  ];
  const order = call.order ? [quoted(call.order.join(","))] : [];
  const lines = [`decision = fusedops.explain(`, `    ${quoted(op.name)},`, ...args, `)`, `print(decision)`];
  const block =
    order.length || settings.length
      ? [`with fusedops.use(${[...order, ...settings].join(", ")}):`, ...lines.map((line) => `    ${line}`)]
      : lines;
  return ["import torch", "import fusedops", "from fusedops import TensorSpec", "", ...block].join("\n");
}

const quoted = (text) => `"${text}"`;

// Words that a shell takes as they are.
const PLAIN = /^[\w,.:@=+/-]+$/;

// The command line's tensors have no compute capability: it is an option for all of them.
export function command(call, op) {
  const value = ({ tensor }, each) => {
    if (each instanceof Spec) return `${each.shape.join(",")}:${each.dtype}@${each.device}`;
    if (each === null) return "none";
    if (tensor) return "1"; // a number in the place of a tensor, such as a seed: a tensor of one element
    return typeof each === "boolean" ? String(each) : text(each);
  };
  const given = op.parameters.filter(({ name }) => name in call.args);
  const capability = given.map(({ name }) => call.args[name]?.capability).find(Boolean);
  const words = [
    ...given.map((parameter) => [parameter.option, value(parameter, call.args[parameter.name])]),
    ...(capability ? [["--capability", capability.join(".")]] : []),
    ...(call.order ? [["--policy", call.order.join(",")]] : []),
    ...(call.fallback === "warn" ? [] : [["--fallback", call.fallback]]),
    ...(call.adapt === "none" ? [] : [["--adapt", call.adapt]]),
    ...(call.rows === "any" ? [] : [["--rows", call.rows]]),
  ];
  const word = (each) => (PLAIN.test(each) ? each : `'${each.replaceAll("'", "'\\''")}'`);
  return [`fusedops explain ${op.name}`, ...words.map(([option, each]) => `${option} ${word(each)}`)].join(" ");
}
