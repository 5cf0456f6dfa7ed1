// Lines over time, as SVG. What a chart shows is also there as a table, and is read off with the pointer.

import { h, s, table } from "./dom.js";
import { clock } from "./words.js";

const W = 640, H = 150, LEFT = 62, RIGHT = 8, TOP = 10, BOTTOM = 20;

/** A small line without axes. `values`: oldest first; `top`: what is full height, if not the largest value. */
export function spark(values, top = Math.max(...values, 1e-12)) {
  const at = (v, i) => `${(i / Math.max(1, values.length - 1)) * 100},${28 - (Math.min(v, top) / top) * 26}`;
  const points = values.map(at);
  return s("svg", { viewBox: "0 0 100 30", height: 30, preserveAspectRatio: "none", "aria-hidden": "true" },
    values.length > 1 && s("path", { class: "area f0", d: `M0,30L${points.join("L")}L100,30Z` }),
    values.length > 1 && s("polyline", { class: "line s0", points: points.join(" ") }));
}

/** A chart. `times`: seconds; `lines`: [{name, values}], null for what is not known; `show`: how a value is written. */
export function chart(title, times, lines, show, { top } = {}) {
  const known = lines.filter((line) => line.values.some((v) => v !== null));
  if (times.length < 2 || !known.length) return h("p", { class: "muted", text: "Nothing yet." });
  const max = top ?? nice(Math.max(...known.flatMap((line) => line.values.filter((v) => v !== null)), 1e-9), show.binary);
  const [from, to] = [times[0], times[times.length - 1]];
  const x = (t) => LEFT + ((t - from) / Math.max(1e-9, to - from)) * (W - LEFT - RIGHT);
  const y = (v) => H - BOTTOM - (Math.min(v, max) / max) * (H - TOP - BOTTOM);
  const cross = s("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const reading = h("p", { class: "reading", "aria-hidden": "true", text: " " });
  const said = (i) => known.map((l) => `${l.name} ${l.values[i] === null ? "–" : show(l.values[i])}`).join(" · ");
  const last = times.length - 1;
  const drawing = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}, at last: ${said(last)}` },
    [0, .5, 1].map((part) => [
      s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(part * max), y2: y(part * max) }),
      s("text", { x: LEFT - 8, y: y(part * max) + 4, "text-anchor": "end", text: show(part * max) }),
    ]),
    s("text", { x: LEFT, y: H - 4, text: clock(from) }),
    s("text", { x: W - RIGHT, y: H - 4, "text-anchor": "end", text: clock(to) }),
    known.map((line, i) => runs(line.values).map(([a, b]) =>
      s("polyline", { class: `line s${i % 6}`, points: times.slice(a, b).map((t, j) => `${x(t).toFixed(1)},${y(line.values[a + j]).toFixed(1)}`).join(" ") }))),
    cross);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const t = from + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (to - from);
    const i = nearest(times, t);
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(times[i]));
    cross.setAttribute("visibility", "visible");
    reading.textContent = `${clock(times[i])}: ${said(i)}`;
  });
  drawing.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    reading.textContent = " ";
  });
  return h("figure", { class: "chart" }, drawing, known.length > 1 ? legend(known.map((l) => l.name)) : null, reading,
    h("details", {}, h("summary", { text: "As a table" }), rows(title, times, known, show)));
}

/** What the colours of a chart or bar mean. */
export function legend(names) {
  return h("ul", { class: "legend" }, names.map((name, i) => h("li", {}, h("i", { class: `c${i % 6}` }), name)));
}

function rows(title, times, lines, show) {
  const step = Math.ceil(times.length / 60);
  const some = times.map((_, i) => i).filter((i) => (times.length - 1 - i) % step === 0).reverse();
  return table(title, [["Time", ""], ...lines.map((l) => [l.name, "n"])],
    some.map((i) => [clock(times[i]), ...lines.map((l) => l.values[i] === null ? "–" : show(l.values[i]))]));
}

/** The stretches without a gap, as [from, to). */
function runs(values) {
  const found = [];
  values.forEach((v, i) => {
    if (v === null) return;
    if (found.length && found[found.length - 1][1] === i) found[found.length - 1][1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}

/** A round number that is not less: 1, 2 or 5 times a power of ten, or a power of two of bytes. */
function nice(value, binary) {
  if (binary) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((n) => n * power >= value * 0.999) * power;
}

function nearest(times, t) {
  let best = 0;
  times.forEach((other, i) => { if (Math.abs(other - t) < Math.abs(times[best] - t)) best = i; });
  return best;
}
