// Reads the answers of the explorer page, as a person sees them: for each address, what the page shows.

const texts = (element, name) => [...element.querySelectorAll(`[data-${name}]`)].map((each) => each.dataset[name]);

function shown() {
  const { error, forward, backward, given, bytes } = document.querySelector("#call-explorer > .strip").dataset;
  if (error) return { error };
  const items = [...document.querySelectorAll("#call-explorer > .chain [data-backend]")];
  items.sort((one, other) => one.dataset.at - other.dataset.at);
  const candidates = items.map((item) => {
    const { backend, status } = item.dataset;
    const reasons = [...item.querySelectorAll(item.matches("li") ? ".forward .reason" : ".reason")].map(({ dataset }) => [
      dataset.code,
      dataset.detail,
      dataset.fix,
    ]);
    const adaptations = [...item.querySelectorAll("[data-adapts]")]
      .map(({ dataset }) => [dataset.adapts, dataset.direction, Number(dataset.bytes)])
      .filter(([, direction]) => direction === "forward" || backend === backward);
    return { backend, status, reasons, deviations: texts(item, "deviation"), adaptations };
  });
  return { backend: forward || null, backward: backward || null, given, bytes: JSON.parse(bytes), candidates };
}

// By addresses that are entered one after the other, each a navigation of the browser.
async function answers(fragments) {
  const all = [];
  for (const fragment of fragments) {
    const changed = new Promise((resolve) => addEventListener("hashchange", resolve, { once: true }));
    if (location.hash !== fragment) {
      location.hash = fragment;
      await changed;
    }
    all.push(shown());
  }
  return all;
}

// The same without navigations, between which the browser lays the page out: a tenth of the time for thousands.
function answersWithoutLayout(fragments) {
  return fragments.map((fragment) => {
    history.replaceState(null, "", fragment);
    dispatchEvent(new HashChangeEvent("hashchange"));
    return shown();
  });
}
