// What L1 or a tier holds, object by object.

import { ask, Refused } from "./api.js";
import { h, part, table } from "./dom.js";
import { ago, count, plural, size } from "./words.js";

export const title = "Objects";
export const intro = "An object is the KV of one chunk of tokens for one KV cache group.";
const PAGE = 100;

export async function load([tier = "l1", namespace = ""]) {
  const [{ tiers }, { namespaces }, page] = await Promise.all([
    ask("tiers"), ask("namespaces", { limit: 200 }), ask("objects", { tier, namespace, limit: PAGE }),
  ]);
  return { tiers, namespaces, page };
}

export function show({ tiers, namespaces, page }, [tier = "l1", namespace = ""]) {
  return [choice(tiers, namespaces, tier, namespace), h("div", { class: "pair" }, listing(page, tier, namespace), place())];
}

/** The address of this view for a tier and a namespace. */
export const address = (tier, namespace = "") => `#/objects/${tier}${namespace ? `/${namespace}` : ""}`;

/** A namespace with what is known of it. */
export const named = (n) => `${n.model || "(no engine uses it)"}${n.tenant ? `, ${n.tenant}` : ""} · ${n.namespace.slice(0, 8)}`;

function choice(tiers, namespaces, tier, namespace) {
  const option = (value, text, chosen) => h("option", { value, text, selected: value === chosen });
  const of = h("select", {}, option("l1", "l1: host memory", tier), tiers.map((t) => option(t.name, t.name === t.storage ? t.name : `${t.name}: ${t.storage}`, tier)));
  const known = namespaces.some((n) => n.namespace === namespace);
  const which = h("select", {}, option("", "all namespaces", namespace),
    namespaces.map((n) => option(n.namespace, `${named(n)} (${plural(n.objects, "object")}, ${size(n.nbytes)})`, namespace)),
    namespace && !known ? option(namespace, namespace, namespace) : null);
  for (const select of [of, which]) select.addEventListener("change", () => { location.hash = address(of.value, which.value); });
  return h("div", { class: "part" }, h("div", { class: "asking" }, h("label", {}, "Place", of), h("label", {}, "Namespace, by what L1 holds", which)));
}

function listing(first, tier, namespace) {
  const rows = [];
  const list = h("div", {});
  const more = h("button", { type: "button", text: "More" });
  const count_ = h("p", { class: "muted small", role: "status" });
  let next;
  const add = (page) => {
    rows.push(...page.objects);
    next = page.next;
    more.hidden = next === null;
    count_.textContent = `${plural(rows.length, "object")}${next === null ? "" : " so far"}, in no particular order.`;
    list.replaceChildren(table("Objects", [["Chunk", ""], ["Group", "n"], ["Size", "n"], ["Last used", "n"]], rows.map((o) => {
      const [, group, hash] = o.name.split("-");
      return [h("button", { type: "button", class: "plain mono", "data-object": o.name, title: o.name, text: hash.slice(0, 24) }), group, size(o.nbytes), o.used ? ago(o.used) : "–"];
    }), "Nothing is there."));
  };
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      add(await ask("objects", { tier, namespace, limit: PAGE, cursor: next }));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      count_.textContent = error.message;
      more.hidden = true;
    }
    more.disabled = false;
  });
  list.addEventListener("click", (event) => {
    const name = event.target.dataset.object;
    if (name) find(name);
  });
  add(first);
  return part(tier === "l1" ? "In host memory" : `In ${tier}`, count_, list, h("div", {}, more));
}

function place() {
  const shown = part("One object", h("div", { id: "place", role: "status" }, h("p", { class: "muted", text: "Choose one to see where it is." })));
  shown.classList.add("beside");
  return shown;
}

async function find(name) {
  const at = document.getElementById("place");
  try {
    const found = await ask(`objects/${encodeURIComponent(name)}`);
    at.replaceChildren(
      h("p", { class: "mono small", text: found.name }),
      table("Where it is", [["Place", ""], ["Size", "n"], ["Readers", "n"]], found.places.map((p) => [p.tier, size(p.nbytes), p.readers === null ? "–" : count(p.readers)])));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    at.replaceChildren(h("p", { text: error.message }));
  }
}
