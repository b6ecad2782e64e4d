// Elements: h("p", {class: "fix"}, "text", child). Texts are never parsed as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function select(attributes, options, chosen) {
  const known = options.some(({ value }) => value === chosen)
    ? options
    : [...options, { value: chosen, label: chosen }];
  const items = known.map(({ value, label = value }) => h("option", { value, selected: value === chosen }, label));
  return h("select", attributes, ...items);
}

// A labelled control. The hint is part of its accessible description.
export function field(label, control, hint = "") {
  const id = `explorer-${label.replaceAll(/\W+/g, "-")}`;
  control.id = id;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    control,
    hint ? h("p", { class: "hint", id: `${id}-hint` }, hint) : null,
  );
}
