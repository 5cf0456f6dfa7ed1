// What is installed.

import { ask } from "./api.js";
import { badge, h, part, table } from "./dom.js";

export const title = "Plugins";
export const intro = "What is installed beside the server, from the packages' metadata. A plugin is loaded only where the configuration names it.";
const KINDS = { storage: "Storages", serde: "Serdes", eviction: "Eviction policies", keys: "Key schemes", engine: "Engines", hooks: "Hooks" };

export const load = () => ask("plugins");

export function show({ plugins }) {
  const kinds = [...new Set(plugins.map((p) => p.kind))];
  return h("div", { class: "pair" }, kinds.map((kind) => part(KINDS[kind] ?? kind,
    table(KINDS[kind] ?? kind, [["Name", ""], ["Package", ""], ["Version", "n"], ["", "n"]],
      plugins.filter((p) => p.kind === kind).map((p) => [
        p.name, p.builtin ? `${p.distribution} (built in)` : p.distribution, p.version,
        p.status === "ready" ? "" : badge(p.status, "bad"),
      ])))));
}
