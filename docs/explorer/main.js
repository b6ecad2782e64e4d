// The page: the state in the address, the form that changes it, and the answer beside it.

import { h } from "./dom.js";
import { show } from "./answer.js";
import { Explorer } from "./explain.js";
import { devicesOf, stateOf } from "./choices.js";
import { Form } from "./form.js";
import { InvalidInput } from "./python.js";
import { command, python } from "./source.js";
import { State } from "./state.js";

const root = document.getElementById("call-explorer");
const parts = Object.fromEntries(
  ["pick", "strip", "chain", "details", "source"].map((name) => [name, h("section", { class: name })]),
);

function start() {
  const explorer = new Explorer(JSON.parse(document.getElementById("explorer-data").textContent));
  const { data } = explorer;
  parts.strip.setAttribute("aria-live", "polite");
  parts.pick.setAttribute("aria-label", "the call");
  root.replaceChildren(...Object.values(parts));

  const changed = (state, again) => {
    history.replaceState(null, "", state.fragment());
    if (again) form.show(state);
    answer(state);
  };
  const form = new Form(data, parts.pick, parts.details, changed, (state) => answerTo(state).error === undefined);

  // The answer of explain, also where a text of the state cannot be read.
  function answerTo(state) {
    try {
      const call = state.call(data);
      return { call, ...explorer.explain(call) };
    } catch (error) {
      if (!(error instanceof InvalidInput)) throw error;
      return { error: error.message, isUnread: true };
    }
  }

  function answer(state) {
    const result = answerTo(state);
    if (result.call) source(parts.source, result.call, data.ops[state.settings.op]);
    else parts.source.replaceChildren();
    show(parts.strip, parts.chain, result, Number(state.settings.bandwidth));
  }

  // The state of the address, with what it leaves out from the first case of the op.
  function read() {
    const state = State.read(location.hash || root.dataset.opens || "");
    const op = data.ops[state.settings.op] ?? Object.values(data.ops)[0];
    const device = state.settings.device || devicesOf(data)[0];
    const complete = stateOf(op, op.cases[0], new State({ ...state.settings, device }, {}));
    const required = op.parameters.every(({ name, required: needed }) => !needed || name in state.args);
    const next = new State(complete.settings, required ? state.args : { ...complete.args, ...state.args });
    form.show(next);
    answer(state.settings.op in data.ops || !state.settings.op ? next : state);
  }

  addEventListener("hashchange", read);
  read();
}

function source(element, call, op) {
  const texts = { python: python(call, op), command: command(call, op) };
  const copied = (label, content) =>
    h("button", { type: "button", onclick: (event) => copy(event.target, content(), label) }, label);
  element.replaceChildren(
    h(
      "div",
      { class: "actions" },
      copied("Copy link", () => location.href),
      copied("Copy as Python", () => texts.python),
      copied("Copy as a command", () => texts.command),
    ),
    h("details", {}, h("summary", {}, "The call as Python"), h("pre", { class: "python" }, h("code", {}, texts.python))),
    h("details", {}, h("summary", {}, "The call as a command"), h("pre", { class: "command" }, h("code", {}, texts.command))),
  );
}

async function copy(button, text, label) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied: the browser refused";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

start();
