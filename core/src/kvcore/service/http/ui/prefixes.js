// What requests have in common: a tree of the prefixes on record.

import { ask } from "./api.js";
import { bar, h, part } from "./dom.js";
import { ago, count, plural, size } from "./words.js";
import { named } from "./objects.js";

export const title = "Prefixes";
export const intro = "Prefixes of the requests on record, joined where they are the same. A branch is a run of chunks that the same requests have. No text is kept, only hashes.";
const DEEP = 2; // so far it is unfolded
const MOST = 10; // so many branches of one are shown at first

export const load = ([namespace]) => ask("prefixes", { namespace });

export function show(found) {
  if (!found.namespaces.length) return part("Nothing on record", h("p", { class: "muted", text: found.requests === null ? "The record is off: inspect.requests is 0." : "No request of a whole chunk has been asked for yet." }));
  const root = new Map([[null, []]]);
  found.nodes.forEach((node, i) => { root.set(i, []); root.get(node.parent).push(i); });
  return [choice(found), part(`${plural(found.requests, "request")} on record, the first ${ago(found.since)}`,
    h("div", { class: "tree" },
      h("div", { class: "node muted small", "aria-hidden": "true" }, ["Chunks", "In host memory", "Tokens", "Requests", "Last use"].map((text) => h("span", { text }))),
      branch(found, root, null, 0)),
    rest(found))];
}

function choice({ namespaces, namespace }) {
  const which = h("select", {}, namespaces.map((n) =>
    h("option", { value: n.namespace, selected: n.namespace === namespace, text: `${named(n)} (${plural(n.requests, "request")})` })));
  which.addEventListener("change", () => { location.hash = `#/prefixes/${which.value}`; });
  return h("div", { class: "part" }, h("div", { class: "asking" }, h("label", {}, "Namespace", which), h("a", { href: `#/objects/l1/${namespace}`, text: "Its objects" })));
}

function branch(found, root, parent, depth) {
  const all = root.get(parent);
  const items = all.map((i) => {
    const line = row(found, found.nodes[i]);
    if (!root.get(i).length) return h("li", {}, line);
    return h("li", {}, h("details", { open: depth < DEEP }, h("summary", {}, line), branch(found, root, i, depth + 1)));
  });
  if (items.length <= MOST + 2) return h("ul", {}, items);
  const more = h("details", {}, h("summary", {}, h("div", { class: "node muted" }, `${items.length - MOST} more branches`)), h("ul", { class: "flat" }, items.slice(MOST)));
  return h("ul", {}, items.slice(0, MOST), h("li", {}, more));
}

function row({ chunk_tokens }, node) {
  const end = node.first + node.chunks;
  const share = node.resident / node.chunks;
  const held = `${size(node.nbytes)}`;
  return h("div", { class: "node" },
    h("span", {}, h("span", { text: node.chunks === 1 ? `chunk ${count(end)}` : `chunks ${count(node.first + 1)} to ${count(end)}` }), " ",
      h("code", { class: "muted", title: node.hash, text: node.hash.slice(0, 12) })),
    h("span", {}, bar(`${count(node.resident)} of ${plural(node.chunks, "chunk")} in host memory`, [[share, "c0"]]), h("span", { class: "small muted", text: held })),
    h("span", { text: `${count(end * chunk_tokens)}`, title: "from the front of the prompt to the end of this branch" }),
    h("span", { text: count(node.requests) }),
    h("span", { class: "muted", text: ago(node.last) }));
}

function rest(found) {
  const words = [];
  if (found.cut) words.push(`${plural(found.cut, "branch").replace("branchs", "branches")} with fewer requests are not shown.`);
  if (found.other_objects) words.push(`${plural(found.other_objects, "object")} in host memory, ${size(found.other_bytes)}, belong to no request on record.`);
  return words.length ? h("p", { class: "muted small", text: words.join(" ") }) : null;
}
