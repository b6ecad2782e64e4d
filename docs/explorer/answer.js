// The answer: who serves the call, what it costs at least, and every candidate with its reasons and fixes.

import { h } from "./dom.js";

const UNITS = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
];

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
    strip.replaceChildren(invalid(answer));
    chain.replaceChildren();
    return;
  }
  strip.replaceChildren(numbers(answer, bandwidth));
  const order = "Candidates, in the order in which they are tried";
  const all = answer.candidates.map((each, at) => ({ ...each, at }));
  const isWith = (code) => (each) => each.isOther && each.reasons[0].code === code;
  chain.replaceChildren(
    h("h2", {}, order),
    h("ol", {}, ...all.filter((each) => !each.isOther).map(candidate)),
    others("For other devices: ", all.filter(isWith("device"))),
    others("Without a kernel for it: ", all.filter(isWith("no-kernel"))),
  );
}

// Backends that take no such call, whatever its arguments, on one line; their reasons show on hover.
function others(label, backends) {
  const names = backends.map(({ backend, status, at, reasons: [{ code, detail, fix }] }) =>
    h(
      "span",
      { "data-backend": backend, "data-status": status, "data-at": at, title: detail },
      h("span", { class: "reason", "data-code": code, "data-detail": detail, "data-fix": fix }, backend),
    ),
  );
  const separated = names.flatMap((each, at) => (at ? [", ", each] : [each]));
  return names.length ? h("p", { class: "others" }, label, ...separated) : "";
}

function invalid({ error, isUnread }) {
  const [problem, fix] = error.replace(/^\w+: /, "").split("; to fix: ");
  return h(
    "div",
    { class: "invalid" },
    h("p", { class: "verdict" }, isUnread ? "This call cannot be read" : "Invalid on every backend"),
    h("p", {}, problem.replace(/^got/, "Got")),
    fix ? h("p", { class: "fix" }, fix) : null,
  );
}

// One table: who serves each direction, and what that costs at least.
function numbers(answer, bandwidth) {
  const directions = ["forward", "backward"];
  const row = (label, value) =>
    h("tr", {}, h("th", { scope: "row" }, label), ...directions.map((each) => h("td", {}, value(each))));
  const by = { forward: answer.backend, backward: answer.backward };
  const served = (direction) =>
    h(
      "th",
      { scope: "col", class: by[direction] ? "by" : "by none" },
      h("span", { class: "direction" }, direction),
      h("strong", {}, by[direction] ?? "no backend"),
    );
  const added = (direction) => {
    const serving = answer.candidates.find((each) => each.backend === by[direction]);
    const { adaptations = [] } = (direction === "forward" ? serving : serving?.backward) ?? {};
    const total = adaptations.reduce((sum, each) => sum + each.bytes, 0n);
    return total ? bytesText(total) : "nothing";
  };
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col", class: "by" }, h("span", { class: "direction" }, "served by")),
        ...directions.map(served),
      ),
    ),
    h(
      "tbody",
      {},
      row("minimum bytes", (direction) => bytesText(answer.bytes[direction])),
      row(`by memory alone, at ${bandwidth || "–"} GB/s`, (direction) => timeText(answer.bytes[direction], bandwidth)),
      row("adaptations", added),
    ),
  );
}

function candidate(each) {
  const { backend, status, backward, at } = each;
  const isWhole = backward !== null && !(status === "refused" && backward.status === "refused");
  return h(
    "li",
    { "data-backend": backend, "data-status": status, "data-at": at, class: status },
    h(
      "div",
      { class: "head" },
      h("strong", {}, backend),
      badge(isWhole ? `forward ${status}` : status, status),
      isWhole ? badge(`backward ${backward.status}`, backward.status) : null,
    ),
    h("div", { class: "about forward" }, ...reasons(each.reasons), ...adaptations(each.adaptations)),
    isWhole
      ? h("div", { class: "about" }, ...reasons(backward.reasons, "backward: "), ...adaptations(backward.adaptations))
      : null,
    status === "refused" ? null : h("div", { class: "about" }, ...deviations(each.deviations)),
  );
}

function badge(label, status) {
  return h("span", { class: `badge ${status}` }, label);
}

function reasons(all, prefix = "") {
  return all.map(({ code, detail, fix }) =>
    h(
      "div",
      { class: "reason", "data-code": code, "data-detail": detail, "data-fix": fix },
      h("p", {}, h("code", { class: "label" }, code), ` ${prefix}${detail}`),
      h("p", { class: "fix" }, fix),
    ),
  );
}

function adaptations(all) {
  return all.map(({ name, sentence, bytes, direction }) =>
    h(
      "p",
      { class: "note", "data-adapts": name, "data-direction": direction, "data-bytes": String(bytes) },
      h("span", { class: "label" }, `adapts ${direction}`),
      ` ${sentence}: `,
      h("b", {}, bytes ? bytesText(bytes) : "free"),
    ),
  );
}

function deviations(all) {
  return all.map(({ name, sentence }) =>
    h("p", { class: "note", "data-deviation": name }, h("span", { class: "label" }, "deviates"), ` ${sentence}`),
  );
}
