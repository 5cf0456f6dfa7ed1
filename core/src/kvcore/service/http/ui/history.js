// Since the cache was opened: the same numbers over time.

import { ask } from "./api.js";
import { chart } from "./charts.js";
import { h, part } from "./dom.js";
import { count, duration, percent, size } from "./words.js";

export const title = "History";
export const intro = "Since the cache was opened, from its own record, which thins out as it grows older.";

export const load = () => ask("history");

const bytes = Object.assign((v) => size(v), { binary: true });
const rate = Object.assign((v) => `${size(v)}/s`, { binary: true });
const each = (v) => `${count(v)}/s`;

export function show({ times, series }) {
  const names = (start) => Object.keys(series).filter((name) => name === start || name.startsWith(`${start}/`));
  const sum = (start) => total(names(start).map((name) => series[name]));
  const hit = growth(times, sum("hit_chunks")), asked = growth(times, sum("lookup_chunks"));
  const share = asked.map((n, i) => n ? Math.min(1, (hit[i] ?? 0) / n) : null);
  const of = (name) => name.split("/")[1];
  const grows = (start, op) => names(start).filter((n) => !op || n.endsWith(`/${op}`)).map((n) => ({ name: of(n), values: growth(times, series[n]) }));
  const free = series["l1_bytes/free"], all = series["l1_bytes/size"];
  const used = all ? all.map((v, i) => v === null || free?.[i] == null ? null : v - free[i]) : [];
  const mean = ratio(growth(times, sum("lookup_seconds")), growth(times, sum("lookups")));
  const x = middle(times);
  const draw = (name, lines, show_, options, at = x) => part(name, chart(name, at, lines, show_, options));
  return h("div", { class: "pair" },
    draw("Hit rate", [{ name: "found of asked", values: share }], percent, { top: 1 }),
    draw("Tokens not computed", [{ name: "tokens", values: growth(times, sum("hit_tokens")) }], each),
    draw("Lookups", [{ name: "lookups", values: growth(times, sum("lookups")) }], each),
    draw("Lookup time, mean", [{ name: "mean", values: mean }], duration),
    draw("Chunks found, by place", grows("hit_chunks"), each),
    draw("Host memory in use", [{ name: "used", values: used }, { name: "size", values: all ?? [] }], bytes, {}, times),
    draw("Loaded from tiers", grows("tier_bytes", "load"), rate),
    draw("Written to tiers", grows("tier_bytes", "store"), rate),
    draw("Evicted from host memory", [{ name: "objects", values: growth(times, sum("evicted_objects")) }], each),
    draw("Connected engines", [{ name: "engines", values: sum("sessions") }], count, {}, times));
}

/** Point by point; null where nobody knows. */
function total(all) {
  if (!all.length) return [];
  return all[0].map((_, i) => all.every((v) => v[i] === null) ? null : all.reduce((sum, v) => sum + (v[i] ?? 0), 0));
}

/** What a number grew by a second, between each two points. What was not there yet was none. */
function growth(times, values) {
  if (!values.length) return [];
  return times.slice(1).map((t, i) => values[i + 1] === null ? null : Math.max(0, values[i + 1] - (values[i] ?? 0)) / Math.max(.001, t - times[i]));
}

const ratio = (a, b) => a.map((v, i) => v !== null && b[i] ? v / b[i] : null);
const middle = (times) => times.slice(1);
