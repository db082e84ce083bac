// Elements made of text and attributes: nothing that comes from a node is ever taken as markup.

export function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A cell with a number.
export function number(text, more = "") {
  return make("td", { class: `number ${more}` }, text);
}

// How much of something is taken: a bar, `text` beside it, and `marks` over the bar.
export function fillBar(fill, { label, text, valueText = text, quality = "", marks = [] }) {
  const level = make("span", { class: "level" });
  level.style.width = `${fill * 100}%`;
  const track = make("span", { class: "track", role: "meter", "aria-valuemin": "0", "aria-valuemax": "1",
    "aria-valuenow": String(fill), "aria-label": label, "aria-valuetext": valueText }, level, ...marks);
  return make("span", { class: `fill ${quality}` }, track, make("span", { class: "text" }, text));
}
