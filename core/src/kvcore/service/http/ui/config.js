// The values in force, and where each comes from.

import { ask } from "./api.js";
import { h, part, table } from "./dom.js";

export const title = "Configuration";
export const intro = "Every value in force and where it comes from. Secrets are not shown, nor sent. Changes over HTTP, such as tiers and quotas, are not in it: after a restart the file holds.";

export const load = () => ask("config");

export function show({ file, values }) {
  const list = h("div", {});
  const words = h("input", { id: "find", type: "search", size: "28" });
  const only = h("input", { type: "checkbox" });
  const draw = () => {
    const found = values.filter((v) => (!only.checked || v.source.kind !== "default")
      && `${v.path} ${text(v.value)} ${source(v.source)}`.toLowerCase().includes(words.value.toLowerCase()));
    list.replaceChildren(table("Values", [["Path", ""], ["Value", ""], ["Source", ""]],
      found.map((v) => [h("code", { text: v.path }), h("span", { class: "mono", text: text(v.value) }), from(v.source)]),
      "No value is like that."));
  };
  words.addEventListener("input", draw);
  only.addEventListener("change", draw);
  draw();
  return part(file || "No file: defaults, environment and flags",
    h("div", { class: "asking" }, h("label", {}, "Find", words), h("label", { class: "row" }, only, "Without defaults")), list);
}

function text(value) {
  if (value === null) return "–";
  return typeof value === "string" ? value || '""' : JSON.stringify(value);
}

/** Short: the file's name alone. */
function from(at) {
  const short = source(at).replace(/^.*\//, "");
  return h("span", { class: at.kind === "default" ? "muted" : "", title: source(at), text: at.kind === "file" ? short : source(at) });
}

function source({ kind, name, line, column }) {
  if (kind === "file") return line ? `${name}:${line}:${column}` : name;
  return kind === "default" ? "default" : `${kind} ${name}`;
}
