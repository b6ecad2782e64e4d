// The form: the op, where it runs, its arguments, and the policy. It reads and changes the texts of the state.

import { asksCapability, devicesOf, floating, sizesNear, stateOf, withDtype } from "./choices.js";
import { field, h, select } from "./dom.js";
import { State, literal, written } from "./state.js";

const plain = (values) => values.map((value) => ({ value }));

export class Form {
  // pick and details: the elements to fill; changed: called with the new state after each change; isValid: of a state.
  constructor(data, pick, details, changed, isValid) {
    Object.assign(this, { data, pick, details, changed, isValid });
  }

  show(state) {
    this.state = state;
    const op = this.data.ops[state.settings.op];
    const focused = document.activeElement?.id;
    this.pick.replaceChildren(...this.choices(op));
    this.details.replaceChildren(
      h("h2", {}, "Arguments"),
      ...op.parameters.map((parameter) => this.argument(parameter)),
      h("h2", {}, "Policy"),
      ...this.policy(op),
    );
    if (focused) document.getElementById(focused)?.focus(); // the new control in its place
  }

  set(name, value, again = false) {
    this.state = new State({ ...this.state.settings, [name]: value }, this.state.args);
    this.changed(this.state, again);
  }

  setArgument(name, value) {
    this.state = new State(this.state.settings, { ...this.state.args, [name]: value });
    this.example.value = this.exampleShown();
    this.changed(this.state);
  }

  choose(op, chosen) {
    this.changed(this.stateOfCase(op, chosen), true);
  }

  // The state of a case, in the dtype that all tensors have now.
  stateOfCase(op, chosen) {
    const next = stateOf(op, chosen, this.state);
    const dtype = this.commonDtype();
    return dtype ? withDtype(next, op, this.data, dtype) : next;
  }

  // The name of the case that the arguments are, "" where they are none.
  exampleShown() {
    const op = this.data.ops[this.state.settings.op];
    const textIn = ({ args }, { name, default: standard }) => args[name] ?? written(standard);
    const isShown = (state) => op.parameters.every((each) => textIn(state, each) === textIn(this.state, each));
    return op.cases.find((each) => isShown(this.stateOfCase(op, each)))?.name ?? "";
  }

  choices(op) {
    const { settings } = this.state;
    const cases = [
      { value: "", label: "another call" },
      ...op.cases.map(({ name, source }) => ({ value: name, label: source ? `${name}: ${source}` : name })),
    ];
    const dtypes = Object.keys(this.data.dtypes).filter((name) => this.data.dtypes[name].floating);
    const chosen = (event) => op.cases.find(({ name }) => name === event.target.value);
    this.example = select(
      { onchange: (event) => event.target.value && this.choose(op, chosen(event)) },
      cases,
      this.exampleShown(),
    );
    return [
      field(
        "op",
        select(
          { onchange: (event) => this.changeOp(event.target.value) },
          plain(Object.keys(this.data.ops)),
          settings.op,
        ),
        op.formula,
      ),
      h(
        "div",
        { class: "pair" },
        field(
          "device",
          select(
            { onchange: (event) => this.set("device", event.target.value, true) },
            plain(devicesOf(this.data)),
            settings.device,
          ),
        ),
        field(
          "dtype",
          select(
            { onchange: (event) => this.changed(withDtype(this.state, op, this.data, event.target.value), true) },
            [...plain(dtypes), ...(this.commonDtype() ? [] : [{ value: "", label: "mixed" }])],
            this.commonDtype(),
          ),
        ),
      ),
      field("example", this.example),
    ];
  }

  changeOp(name) {
    const op = this.data.ops[name];
    this.choose(op, op.cases[0]);
  }

  // The dtype of all floating tensors, "" where they differ.
  commonDtype() {
    const op = this.data.ops[this.state.settings.op];
    const kinds = floating(op, this.state, this.data).map((name) => this.state.args[name].match(/:([^@]*)/)?.[1]);
    return new Set(kinds).size === 1 ? (kinds[0] ?? "") : "";
  }

  argument(parameter) {
    const { name, hints } = parameter;
    const text = this.state.args[name] ?? written(parameter.default);
    if (parameter.tensor) return this.tensor(parameter, text);
    const hint = hints.join("; ");
    if (!parameter.choices.length) {
      return field(
        name,
        h("input", {
          value: text,
          spellcheck: "false",
          oninput: (event) => this.setArgument(name, event.target.value),
        }),
        hint,
      );
    }
    const options = plain([...new Set([written(parameter.default), ...parameter.choices.map(written)])]);
    const chosen = written(literal(text));
    return field(name, select({ onchange: (event) => this.setArgument(name, event.target.value) }, options, chosen));
  }

  tensor(parameter, text) {
    const { name, required, hints, number } = parameter;
    const op = this.data.ops[this.state.settings.op];
    const isGiven = text !== "None";
    const shape = h("input", {
      value: isGiven ? text.replace(/:[^@]*/, "") : "",
      spellcheck: "false",
      placeholder: number ? "None, a number, or sizes" : "None",
      disabled: !isGiven,
    });
    const likely = this.data.dtypes[parameter.dtype].floating ? this.commonDtype() || parameter.dtype : parameter.dtype;
    const dtype = select(
      { "aria-label": `dtype of ${name}`, disabled: !isGiven },
      plain(Object.keys(this.data.dtypes)),
      text.match(/:([^@]*)/)?.[1] ?? likely,
    );
    const given = required
      ? null
      : h("input", { type: "checkbox", checked: isGiven, "aria-label": `${name} is given` });
    const update = () => {
      const [sizes, on] = shape.value.split("@");
      const isNumber = number && !/[,x@]/.test(shape.value) && shape.value;
      const tensor = isNumber ? shape.value : `${sizes}:${dtype.value}${on === undefined ? "" : `@${on}`}`;
      this.setArgument(name, given && !given.checked ? "None" : tensor);
    };
    shape.addEventListener("input", update);
    dtype.addEventListener("change", update);
    given?.addEventListener("change", () => {
      shape.disabled = dtype.disabled = !given.checked;
      if (!shape.value) shape.value = this.suggested(op, name, dtype.value);
      update();
    });
    const row = field(name, shape, hints.join("; "));
    row.classList.add("tensor");
    if (given) row.prepend(h("span", { class: "given" }, given));
    shape.after(dtype);
    return row;
  }

  // Sizes with which an optional tensor makes a valid call.
  suggested(op, name, dtype) {
    const changed = (sizes) => new State(this.state.settings, { ...this.state.args, [name]: `${sizes}:${dtype}` });
    const offered = sizesNear(op, name, this.state);
    return offered.find((sizes) => this.isValid(changed(sizes))) ?? offered[0];
  }

  policy(op) {
    const { settings } = this.state;
    const setter = (name) => (event) => this.set(name, event.target.value);
    const names = this.data.backends.map((backend) => backend.name).join(", ");
    return [
      field(
        "policy",
        h("input", {
          value: settings.policy,
          spellcheck: "false",
          placeholder: "the default order",
          oninput: setter("policy"),
        }),
        `Names in order, of ${names}.`,
      ),
      h(
        "div",
        { class: "pair" },
        field(
          "fallback",
          select({ onchange: setter("fallback") }, plain(["warn", "silent", "raise"]), settings.fallback),
        ),
        field("adapt", select({ onchange: setter("adapt") }, plain(["none", "pad"]), settings.adapt)),
        field("rows", select({ onchange: setter("rows") }, plain(["any", "independent"]), settings.rows)),
      ),
      h(
        "div",
        { class: "pair" },
        asksCapability(op, settings.device, this.data)
          ? field(
              "compute capability",
              h("input", { value: settings.capability, placeholder: "any", oninput: setter("capability") }),
            )
          : null,
        field(
          "bandwidth, GB/s",
          h("input", { value: settings.bandwidth, inputmode: "decimal", oninput: setter("bandwidth") }),
        ),
      ),
    ];
  }
}
