// Line charts in one <svg>, drawn anew with each set of points. A gap in the data is a gap in the line.

import { formatTime } from "./format.js";

const WIDTH_MIN = 240;
const HEIGHT = 180;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
const Y_LINES = 4;
const DOT_RADIUS = 3;
const DOTS_MAX = 40;

// `series`: [{name, points: [[unix s, number or null], ...]}], all over the same times.
// `range`: [from, to] in unix seconds. `top`: the highest y value; without it that of the data.
// `marks`: [{name, y}], horizontal lines. `isWhole`: values are whole numbers, and so are the marks of y.
export function drawChart(svg, { series, range, top, isWhole = false, marks = [], format, label, readout }) {
  const [from, to] = range;
  // One unit of the drawing is one pixel, so that letters have the size of letters.
  const width = Math.max(svg.clientWidth, WIDTH_MIN);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const largest = Math.max(0, ...series.flatMap(yValues));
  const highest = top ?? Math.max(niceTop(largest), isWhole ? Y_LINES : 0);
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - Math.min(value, highest) / highest) * (HEIGHT - TOP - BOTTOM);
  const parts = [...drawGrid(svg, { width, from, to, highest, x, y, format })];
  for (const { name, y: value } of marks) {
    const line = shape(svg, "line", { class: "mark", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    line.append(shape(svg, "title", {}, `${name}: ${format(value)}`));
    parts.push(line);
  }
  for (const [index, { points }] of series.entries()) {
    parts.push(...drawLine(svg, points, x, y, `series-${index + 1}`));
  }
  svg.replaceChildren(shape(svg, "title", {}, label), ...parts);
  svg.setAttribute("aria-label", label);
  followPointer(svg, { width, series, from, to, format, readout });
}

function yValues({ points }) {
  return points.map(([, value]) => value ?? 0);
}

function niceTop(highest) {
  if (highest <= 0) return 1;
  const step = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 4, 8, 10].map((factor) => factor * step).find((value) => value >= highest);
}

function* drawGrid(svg, { width, from, to, highest, x, y, format }) {
  for (let index = 0; index <= Y_LINES; index += 1) {
    const value = (highest * index) / Y_LINES;
    yield shape(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    yield shape(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
  }
  for (const share of [0, 0.5, 1]) {
    const at = from + (to - from) * share;
    const anchor = ["start", "middle", "end"][share * 2];
    yield shape(svg, "text", { x: x(at), y: HEIGHT - 6, "text-anchor": anchor }, formatTime(at));
  }
}

function* drawLine(svg, points, x, y, name) {
  const isSparse = points.filter(([, value]) => value !== null).length <= DOTS_MAX;
  let path = "";
  let run = [];
  const close = () => {
    if (run.length > 1) path += `M${run.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`;
    const alone = run.length === 1 ? run[0] : null;
    run = [];
    return alone;
  };
  const dots = [];
  for (const [at, value] of [...points, [0, null]]) {
    if (value !== null) {
      run.push([x(at), y(value)]);
      continue;
    }
    // Of a few points each is shown; one without neighbours would be a line of no length.
    if (isSparse) dots.push(...run);
    const alone = close();
    if (alone && !isSparse) dots.push(alone);
  }
  if (path) yield shape(svg, "path", { class: name, d: path });
  for (const [cx, cy] of dots) yield shape(svg, "circle", { class: `dot ${name}`, cx, cy, r: DOT_RADIUS });
}

function followPointer(svg, { width, series, from, to, format, readout }) {
  const times = series[0]?.points.map(([at]) => at) ?? [];
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT);
    const index = nearest(times, from + (to - from) * share);
    if (index < 0) return;
    const values = series.map(({ name, points }) => `${name} ${format(points[index][1])}`);
    readout.textContent = `${formatTime(times[index])}: ${values.join(", ")}`;
  };
  svg.onpointerleave = () => { readout.textContent = ""; };
}

function nearest(times, wanted) {
  let best = -1;
  for (const [index, at] of times.entries()) {
    if (best < 0 || Math.abs(at - wanted) < Math.abs(times[best] - wanted)) best = index;
  }
  return best;
}

// The namespace is read from the page's own element.
function shape(svg, name, attributes, text) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
