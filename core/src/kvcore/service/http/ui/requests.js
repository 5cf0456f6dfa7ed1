// What was asked for and what came of it; and why, for one request.

import { ask, Refused } from "./api.js";
import { bar, h, part, table } from "./dom.js";
import { ago, brief, clock, count, duration, plural } from "./words.js";

export const title = "Requests";
export const every = 0;
const SHOWN = 200;

export async function load([id]) {
  if (id) return { explained: await ask("explain", { request: id }) };
  return { recent: await ask("requests", { limit: SHOWN }) };
}

export function show({ recent, explained }, [id], again) {
  return [question(id, again), explained ? explanations(explained) : listing(recent)];
}

/** Chunks from the front that the engine or the cache had; while it is being asked, none are known of. */
const there = (r) => r.answer ?? r.first;
const named = (r) => r.id || `no.${r.seq}`;
const address = (id) => `#/requests/${encodeURIComponent(id)}`;

function question(id = "", again) {
  const field = h("input", { id: "request", size: "36", value: id, spellcheck: "false", autocomplete: "off" });
  const form = h("form", { class: "part" },
    h("div", { class: "asking" }, h("label", { class: "wide" }, "Request id, or a part of one", field),
      h("button", { class: "main", type: "submit", text: "Explain" }),
      id ? h("a", { href: "#/requests", text: "All requests" }) : h("button", { type: "button", text: "Refresh", on: { click: again } })));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) location.hash = address(field.value.trim());
  });
  return form;
}

function listing({ requests, newest, oldest }) {
  const rows = [...requests].reverse().map((r) => [
    h("a", { href: address(named(r)), class: "mono", title: named(r), text: brief(named(r), 26) }),
    clock(r.at),
    h("div", { class: "once" }, r.model || r.namespace.slice(0, 8), h("div", { class: "small muted", text: [r.tenant, r.adapter].filter(Boolean).join(" · ") })),
    count(r.tokens || r.chunks * r.chunk_tokens),
    h("div", {}, bar(`${count(there(r))} of ${plural(r.chunks, "chunk")} there`, [[r.first / Math.max(1, r.chunks), "c5"], [(there(r) - r.first) / Math.max(1, r.chunks), "c0"]]),
      h("span", { class: "small muted once", text: r.chunks ? `${count(there(r))} of ${count(r.chunks)} chunks` : "no whole chunk" })),
    Object.entries(r.sources).map(([place, n]) => `${place} ${count(n)}`).join(", ") || "–",
    r.broke ? [r.broke.replaceAll("_", " "), r.blame && `(${r.blame})`].filter(Boolean).join(" ") : "–",
    duration(r.seconds), count(r.retrieved), count(r.stored),
  ]);
  return part(`The last ${plural(requests.length, "request")}${oldest > 1 ? `, of ${count(newest)} since start` : ""}`,
    table("Requests", [["Request", ""], ["Asked", ""], ["Whose", ""], ["Tokens", "n"], ["There", ""], ["From", ""], ["Broke by", ""], ["Took", "n"], ["Tokens read", "n"], ["Chunks stored", "n"]],
      rows, "No request is on record."));
}

function explanations({ explanations: all, more }) {
  return [
    all.map((e, i) => explanation(e, i, all.length)),
    more.length ? part("Other requests like that", h("ul", { class: "steps" }, more.map((id) => h("li", {}, h("a", { href: address(id), class: "mono", text: id }))))) : null,
  ];
}

function explanation(e, i, all) {
  const name = e.request || "a prompt";
  return part(all > 1 ? `${name}, lookup ${all - i} of ${all}` : name,
    h("p", { class: "answer" }, e.broke ? [h("strong", { text: e.chunks ? `Chunk ${count(e.broke.chunk + 1)} (tokens ${count(e.broke.begin)} to ${count(e.broke.end - 1)}) ` : "" }), prose(e.broke.text), "."]
      : `All ${plural(e.chunks, "whole chunk")} of it were there.`),
    e.broke?.remedy ? h("p", {}, h("strong", { text: "What helps: " }), prose(e.broke.remedy), ".") : null,
    chain(e), facts(e),
    e.broke?.events.length ? history(e.broke) : null,
    e.broke?.differences.length ? differences("In what the namespaces differ", e.broke.differences) : null,
    e.nearest ? nearest(e.nearest) : null,
    e.notes.length ? h("ul", { class: "steps muted small" }, e.notes.map((text) => h("li", { text }))) : null);
}

/** Text with its commands between backticks. */
const prose = (text) => text.replace(/\.$/, "").split("`").map((part, i) => i % 2 ? h("code", { text: part }) : part);

/** Chunk by chunk: what the engine held, what the cache had, where it broke, what had to be computed. */
function chain({ chunks, found, broke }) {
  if (!chunks) return null;
  const end = found.held + found.chunks;
  const said = `${count(found.held)} held by the engine, ${count(found.chunks)} from the cache, ${count(chunks - end)} computed`;
  const key = [["c5", "held by the engine"], ["c0", "from the cache"], ["", "computed"]];
  const names = h("ul", { class: "legend" }, key.map(([kind, text], i) => h("li", {}, h("i", { class: kind || "crest" }), `${text}: ${count([found.held, found.chunks, chunks - end][i])}`)));
  if (chunks > 400) return h("div", {}, bar(said, [[found.held / chunks, "c5"], [found.chunks / chunks, "c0"]]), names);
  const kind = (at) => at < found.held ? "c5" : at < end ? "c0" : at === broke?.chunk ? "broke" : "";
  return h("div", {}, h("div", { class: "chain", role: "img", "aria-label": said },
    Array.from({ length: chunks }, (_, at) => h("span", { class: kind(at), title: `chunk ${at + 1}` }))), names);
}

function facts(e) {
  const places = (all) => Object.entries(all).map(([place, n]) => `${place.replaceAll("_", " ")} ${count(n)}`).join(", ") || "nothing";
  const rows = [
    ["Asked", `${clock(e.at)} (${ago(e.at)}), answered in ${duration(e.lookup_s)}`],
    ["Of", [e.model, e.adapter && `adapter ${e.adapter}`, e.salt && `salt ${e.salt}`, `namespace ${e.namespace.slice(0, 8)}`, `by ${e.cache}`].filter(Boolean).join(" · ")],
    ["Prompt", `${e.tokens ? `${plural(e.tokens, "token")}, ` : ""}${plural(e.chunks, "whole chunk")} of ${count(e.chunk_tokens)} tokens`],
    ["Found in", places(e.found.places)],
    ["Missing", places(e.found.misses)],
    ["Saved", e.saved.tokens === null ? "not known: the engine does not say for which request it loads" : `${plural(e.saved.tokens, "token")} not computed${e.saved.seconds === null ? "" : `, ${duration(e.saved.seconds)} estimated`}`],
    ["Stored", plural(e.stored, "object")],
    e.now && ["Asked now", `${plural(e.now.chunks, "chunk")} (${places(e.now.places)})${Object.entries(e.now.silent).map(([t, why]) => `; ${t} does not say: ${why}`).join("")}`],
  ];
  return h("dl", { class: "facts" }, rows.filter(Boolean).map(([name, text]) => [h("dt", { text: name }), h("dd", { text })]));
}

function history(broke) {
  return h("div", {}, h("h3", { text: `What is on record of chunk ${count(broke.chunk + 1)}` }),
    table(`Chunk ${broke.chunk + 1}`, [["When", ""], ["Place", ""], ["What", ""], ["Why", ""]],
      broke.events.map((event) => [clock(event.at), event.place, event.what.replaceAll("_", " "), event.reason.replaceAll("_", " ")])));
}

function differences(name, all) {
  return h("div", {}, h("h3", { text: name }),
    table(name, [["", ""], ["Here", ""], ["There", ""]], all.map((d) => [d.field, d.here, d.there])));
}

function nearest(n) {
  const ids = (list) => h("code", {}, list.flatMap((id, i) => [i ? " " : "", i === n.at_here ? h("mark", { text: String(id) }) : String(id)]));
  return h("div", {}, h("h3", { text: "The nearest other request on record" }),
    h("p", {}, h("a", { href: address(n.request), class: "mono", text: n.request || "(no id)" }), `, ${ago(n.at)}: ${plural(n.chunks, "whole chunk")} in common${n.tokens === null ? "" : `, ${plural(n.tokens, "token")}`}.`),
    n.here.length ? h("p", {}, "Token ids here: ", ids(n.here), h("br"), "there: ", ids(n.there)) : null,
    n.differences.length ? differences("In what it differs", n.differences) : null);
}
