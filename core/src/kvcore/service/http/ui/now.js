// Now: how much is found, where, how fast, and what is not as it should be.

import { ask, Refused, samples } from "./api.js";
import { spark, legend } from "./charts.js";
import { badge, bar, h, part, table } from "./dom.js";
import { age, ago, count, duration, percent, plural, size } from "./words.js";

export const title = "Now";
export const every = 2;
const KEPT = 60;
const seen = []; // of the last minutes: {at, one number by name}

export async function load() {
  const [status, health, text, tenants, hot] = await Promise.all([
    ask("status"), ask("healthz"), ask("metrics"), unless(ask("tenants", { limit: 20 })), unless(ask("hot", { limit: 8 })),
  ]);
  const numbers = sums(samples(text));
  seen.push({ at: performance.now() / 1000, ...numbers });
  if (seen.length > KEPT) seen.shift();
  return { status, health, numbers, tenants, hot };
}

/** What is refused, as a value. */
const unless = (asked) => asked.catch((error) => { if (error instanceof Refused && error.status) return error; throw error; });

/** The numbers that are shown, out of all metrics. */
function sums(found) {
  const all = (name, like = {}) => (found.get(name) ?? [])
    .filter(({ labels }) => Object.entries(like).every(([k, v]) => labels[k] === v));
  const sum = (name, like) => all(name, like).reduce((total, { value }) => total + value, 0);
  const by = (name, label, like) => Object.fromEntries(all(name, like).map(({ labels, value }) => [labels[label], value]));
  return {
    lookups: sum("kvcore_lookups_total"),
    asked: sum("kvcore_lookup_chunks_total"),
    hits: by("kvcore_hit_chunks_total", "source"),
    hit: sum("kvcore_hit_chunks_total"),
    misses: by("kvcore_miss_chunks_total", "reason"),
    tokens: sum("kvcore_hit_tokens_total"),
    saved: sum("kvcore_saved_prefill_seconds_total"),
    stored: sum("kvcore_stored_chunks_total"),
    evicted: sum("kvcore_evicted_objects_total"),
    loaded: by("kvcore_tier_bytes_total", "tier", { op: "load" }),
    written: by("kvcore_tier_bytes_total", "tier", { op: "store" }),
    load: sum("kvcore_tier_bytes_total", { op: "load" }),
    store: sum("kvcore_tier_bytes_total", { op: "store" }),
    took: by("kvcore_lookup_seconds_bucket", "le"),
  };
}

/** What a number that only grows grew by a second, between each two of the last samples. */
function rates(name, of = (v) => v) {
  return seen.slice(1).map((s, i) => Math.max(0, of(s[name]) - of(seen[i][name])) / Math.max(.001, s.at - seen[i].at));
}

const last = (values) => values.length ? values[values.length - 1] : 0;
const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;

/** The lookup time that this share of all lookups keep to, from the bounds of a histogram; Infinity: above the last. */
function within(took, share) {
  const bounds = Object.entries(took).map(([le, n]) => [le === "+Inf" ? Infinity : Number(le), n]).sort((a, b) => a[0] - b[0]);
  const all = bounds.length ? bounds[bounds.length - 1][1] : 0;
  return all ? bounds.find(([, n]) => n >= share * all)[0] : null;
}

export function show({ status, health, numbers, tenants, hot }) {
  return [
    alarms(health, status),
    tiles(numbers),
    h("div", { class: "pair" }, memory(status.l1), found(numbers)),
    tiers(status.tiers, numbers),
    h("div", { class: "pair" }, shares(tenants), engines(status.sessions)),
    hottest(hot),
    helpers(status.helpers),
  ];
}

function alarms(health, status) {
  const wrong = health.checks.filter((check) => check.status !== "ok");
  if (!wrong.length) return null;
  return wrong.map((check) => {
    const tier = status.tiers.find((t) => check.name === `tier ${t.name}`);
    const what = tier ? `${tier.cause}. Requests go on without it, and it is tried again.` : `${check.detail}.`;
    return h("p", { class: `notice ${check.status === "stuck" ? "bad" : ""}` },
      h("strong", { text: `${check.name} is ${tier ? tier.state : check.status}` }), check.since ? `, for ${age(check.since)}: ` : ": ", what);
  });
}

function tile(name, value, under, values, top) {
  return h("div", { class: "tile" }, h("span", { class: "name", text: name }), h("span", { class: "value", text: value }),
    h("span", { class: "muted small", text: under }), values ? spark(values, top) : null);
}

function tiles(n) {
  const window = seen.length > 1 ? duration(Math.round(last(seen).at - seen[0].at)) : "";
  const lately = (name) => mean(rates(name));
  const share = seen.slice(1).map((s, i) => s.asked > seen[i].asked ? (s.hit - seen[i].hit) / (s.asked - seen[i].asked) : 0);
  const asked = last(seen).asked - seen[0].asked, hit = last(seen).hit - seen[0].hit;
  const p50 = within(n.took, .5), p99 = within(n.took, .99);
  const bound = (s) => s === null ? "–" : s === Infinity ? "over 10 s" : `≤ ${duration(s)}`;
  return h("div", { class: "tiles" },
    tile("Hit rate", percent(asked ? hit / asked : n.asked ? n.hit / n.asked : null),
      asked ? `${percent(n.hit / n.asked)} since start` : "since start: nothing asked just now", share, 1),
    tile("Tokens not computed", count(n.tokens), n.saved ? `some ${duration(n.saved)} of prefill` : "since start", rates("tokens")),
    tile("Lookups", `${count(lately("lookups"))}/s`, `${count(n.lookups)} since start`, rates("lookups")),
    tile("Lookup time", bound(p50), `99 %: ${bound(p99)}`, null),
    tile("Loaded from tiers", `${size(lately("load"))}/s`, window ? `mean of ${window}` : "", rates("load")),
    tile("Written to tiers", `${size(lately("store"))}/s`, window ? `mean of ${window}` : "", rates("store")));
}

function memory(l1) {
  const used = l1.size - l1.free - l1.quarantined;
  return part("Host memory (L1)",
    bar(`${size(used)} of ${size(l1.size)} used`, [[used / l1.size, "c0"], [l1.quarantined / l1.size, "cmiss"]]),
    h("p", { text: `${size(used)} of ${size(l1.size)} used (${percent(used / l1.size)}), ${plural(l1.objects, "object")}` }),
    h("p", { class: "muted small", text: `${plural(l1.staging, "object")} being written · ${plural(l1.leases, "lease")} · ${size(l1.quarantined)} quarantined` }));
}

function found(n) {
  const names = Object.keys(n.hits).filter((name) => n.hits[name]);
  const missed = Object.entries(n.misses).filter(([, v]) => v).sort((a, b) => b[1] - a[1]);
  const total = Math.max(1, n.hit + missed.reduce((sum, [, v]) => sum + v, 0));
  const said = [...names.map((name) => `${name} ${percent(n.hits[name] / total)}`), `missing ${percent(1 - n.hit / total)}`];
  return part("Where chunks were found, since start",
    n.asked ? bar(said.join(", "), [...names.map((name, i) => [n.hits[name] / total, `c${i % 6}`])]) : null,
    names.length ? legend(said.slice(0, -1)) : h("p", { class: "muted", text: n.asked ? "None was found yet." : "Nothing has been asked for yet." }),
    missed.length ? h("p", { class: "muted small", text: `Missing: ${missed.slice(0, 4).map(([why, v]) => `${count(v)} ${why.replaceAll("_", " ")}`).join(" · ")}` }) : null);
}

const KINDS = { open: "ok", opening: "warn", down: "bad", stuck: "bad" };

function tiers(all, n) {
  const rate = (name, tier) => mean(rates(name, (by) => by[tier] ?? 0));
  const holds = ({ usage }) => !usage ? "–" : `${size(usage.nbytes)}${usage.capacity ? ` of ${size(usage.capacity)}` : ""}, ${plural(usage.objects, "object")}`;
  return part("Tiers", table("Tiers",
    [["Tier", ""], ["State", ""], ["Holds", ""], ["Waits to be written", "n"], ["Loads", "n"], ["Writes", "n"], ["Found there", "n"]],
    all.map((t) => [
      h("div", {}, t.name, h("div", { class: "muted small", text: [t.storage, ...t.serde, `write: ${t.write}`].join(" · ") })),
      h("div", {}, badge(t.state, KINDS[t.state]), t.cause ? h("div", { class: "small", text: `for ${age(t.since)}: ${t.cause}` }) : null),
      holds(t), `${size(t.queue_bytes)}`, `${size(rate("loaded", t.name))}/s`, `${size(rate("written", t.name))}/s`, count(n.hits[t.name] ?? 0),
    ]), "No tiers: what leaves host memory is gone."));
}

function hottest(hot) {
  if (hot instanceof Refused) return locked("Hottest prefixes", hot);
  return part("Hottest prefixes", table("Hottest prefixes",
    [["Prefix", ""], ["Model", ""], ["Tenant", ""], ["Tokens", "n"], ["Requests", "n"], ["Had it", "n"], ["Last", "n"]],
    hot.prefixes.map((p) => [
      h("a", { href: `#/prefixes/${p.namespace}`, class: "mono", text: p.hash.slice(0, 16) }), p.model || p.namespace.slice(0, 8), p.tenant || "–",
      count(p.tokens), count(p.requests), percent(p.hits / p.requests), ago(p.last),
    ]), "No prefix was asked for twice yet."));
}

function engines(sessions) {
  return part("Engines", table("Engines", [["Engine", ""], ["Process", "n"], ["Since", "n"], ["Models", "n"], ["Workers", "n"]],
    sessions.map((x) => [x.name, String(x.pid), ago(x.since), count(x.spaces), count(x.workers)]), "None is connected."));
}

function shares(tenants) {
  if (tenants instanceof Refused) return locked("Tenants", tenants);
  const name = (t) => t.tenant === "default" ? "all others" : t.tenant || "(none)";
  const rows = tenants.tenants.flatMap((t) => t.places.map((p) => {
    const more = p.used > p.quota ? `, ${size(p.used - p.quota)} borrowed` : "";
    const said = `${size(p.used)} of ${size(p.quota)}${more}`;
    return [name(t), p.place, bar(said, [[p.quota ? p.used / p.quota : 0, p.used > p.quota ? "cover" : "c0"]]), said];
  }));
  return part("Tenants", table("Tenants", [["Tenant", ""], ["Place", ""], ["Holds", ""], ["of its quota", "n"]], rows, "No place is divided among tenants."));
}

function helpers(all) {
  if (!all.length) return null;
  return part("Programs beside the server", table("Programs beside the server", [["Program", ""], ["State", ""], ["Since", "n"], ["Starts", "n"], ["Ended", ""]],
    all.map((x) => [x.name, badge(x.state, { running: "ok", failed: "bad" }[x.state] ?? ""), ago(x.since), count(x.starts), x.last])));
}

/** A part that needs the token. */
function locked(name, error) {
  return part(name, h("p", { class: "muted", text: error.locked ? "Shown with the server's token." : error.message }));
}
