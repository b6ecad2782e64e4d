// The answer: who serves the call, what it costs at least, and every candidate with its reasons and fixes.

import { h } from "./dom.js";
import { Spec, repr } from "./python.js";

const UNITS = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
];

// Reasons that hold for every call on a device.
const NOT_ABOUT_ARGUMENTS = ["device", "no-kernel"];

export function bytesText(bytes) {
  const [unit, name] = UNITS.find(([size]) => Number(bytes) >= size) ?? [1, "bytes"];
  return `${significant(Number(bytes) / unit)} ${bytes === 1n ? "byte" : name}`;
}

export function timeText(bytes, bandwidth) {
  const seconds = Number(bytes) / (bandwidth * 1e9);
  if (!(bandwidth > 0) || !Number.isFinite(seconds)) return "–";
  const [unit, name] = [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "µs"],
  ].find(([size]) => seconds >= size) ?? [1e-9, "ns"];
  return `${significant(seconds / unit)} ${name}`;
}

const significant = (value) =>
  value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

// Fills the two parts of the answer. The attributes data-* are for programs.
export function show(strip, chain, answer, bandwidth) {
  strip.dataset.error = answer.error ?? "";
  strip.dataset.code = answer.reason?.code ?? "";
  strip.dataset.forward = answer.backend ?? "";
  strip.dataset.backward = answer.backward ?? "";
  strip.dataset.given = answer.given ?? "";
  strip.dataset.bytes = JSON.stringify(answer.bytes ?? null, (_, value) =>
    typeof value === "bigint" ? Number(value) : value,
  );
  if (answer.error !== undefined) {
    strip.replaceChildren(invalid(answer.error));
    chain.replaceChildren();
    return;
  }
  strip.replaceChildren(
    h("div", { class: "served" }, served("forward", answer.backend), served("backward", answer.backward)),
    numbers(answer, bandwidth),
  );
  const order = `Candidates, in the order in which they are tried`;
  chain.replaceChildren(h("h2", {}, order), h("ol", { class: "chain" }, ...answer.candidates.map(candidate)));
}

function invalid(error) {
  const [problem, fix] = error.split("; to fix: ");
  return h(
    "div",
    { class: "invalid" },
    h("p", { class: "verdict" }, "Invalid on every backend"),
    h("p", {}, sentence(problem)),
    fix ? h("p", { class: "fix" }, fix) : null,
  );
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function served(direction, backend) {
  const name = backend ?? "no backend";
  return h(
    "div",
    { class: backend ? "by" : "by none" },
    h("span", { class: "direction" }, direction),
    h("strong", {}, name),
  );
}

function numbers(answer, bandwidth) {
  const row = (label, value) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, label),
      ...["forward", "backward"].map((direction) => h("td", {}, value(direction))),
    );
  const added = (direction) => {
    const serving = answer.candidates.find(
      (each) => each.backend === (direction === "forward" ? answer.backend : answer.backward),
    );
    const of = direction === "forward" ? serving : serving?.backward;
    return (of?.adaptations ?? []).map((each) => each.bytes).reduce((total, bytes) => total + bytes, 0n);
  };
  return h(
    "table",
    { class: "numbers" },
    h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "forward"), h("th", { scope: "col" }, "backward"))),
    h(
      "tbody",
      {},
      row("minimum bytes", (direction) => bytesText(answer.bytes[direction])),
      row(`at ${bandwidth || "–"} GB/s`, (direction) => timeText(answer.bytes[direction], bandwidth)),
      row("adaptations write", (direction) => (added(direction) ? bytesText(added(direction)) : "nothing")),
    ),
  );
}

function candidate(each) {
  const { backend, status, backward } = each;
  const isPassed = each.reasons.length > 0 && each.reasons.every(({ code }) => NOT_ABOUT_ARGUMENTS.includes(code));
  const isWhole = backward !== null && !(status === "refused" && backward.status === "refused");
  return h(
    "li",
    { "data-backend": backend, "data-status": status, class: `${status}${isPassed ? " passed" : ""}` },
    h(
      "div",
      { class: "head" },
      h("strong", {}, backend),
      badge(isWhole ? `forward ${status}` : status, status),
      isWhole ? badge(`backward ${backward.status}`, backward.status) : null,
    ),
    h("div", { class: "about forward" }, ...about(each)),
    isWhole ? h("div", { class: "about backward" }, ...about(backward, "backward: ")) : null,
  );
}

function badge(label, status) {
  return h("span", { class: `badge ${status}` }, label);
}

function about({ reasons, deviations, adaptations }, prefix = "") {
  return [
    ...reasons.map((reason) =>
      h(
        "div",
        { class: "reason", "data-code": reason.code, "data-detail": reason.detail, "data-fix": reason.fix },
        h("p", {}, h("code", { class: "code" }, reason.code), ` ${prefix}${reason.detail}`),
        h("p", { class: "fix" }, reason.fix),
      ),
    ),
    ...adaptations.map(({ name, sentence: what, bytes, direction }) =>
      h(
        "p",
        { class: "adapts", "data-adapts": name, "data-direction": direction, "data-bytes": String(bytes) },
        h("span", { class: "label" }, "adapts"),
        ` ${prefix}${what}: `,
        h("b", {}, bytes ? bytesText(bytes) : "free"),
      ),
    ),
    ...(prefix || reasons.length
      ? []
      : deviations.map(({ name, sentence: what }) =>
          h(
            "p",
            { class: "deviation", "data-deviation": name },
            h("span", { class: "label" }, "deviation"),
            ` ${what}`,
          ),
        )),
  ];
}

// ------------------------------------------------------------------------------------------------- the call as source

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
