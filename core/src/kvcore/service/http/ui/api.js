// Asks this server. The token is kept for this tab only: in its session storage, and nowhere else.

const KEPT = "kvcore-token";

/** Why the server did not answer what was asked. `status` 0: it cannot be reached. */
export class Refused extends Error {
  constructor(status, type, detail) {
    super(detail);
    this.status = status;
    this.type = type;
  }

  /** A token would help. */
  get locked() { return this.status === 401 || this.status === 403; }
}

export const token = {
  /** The last one was not the server's. */
  wrong: false,
  /** Called when the server has refused it; it is forgotten then. */
  refused: () => {},
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (value) => {
    token.wrong = false;
    if (value) sessionStorage.setItem(KEPT, value);
    else sessionStorage.removeItem(KEPT);
  },
};

/** What the server answers, JSON as values, else text. Throws `Refused`. */
export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, v]) => v !== undefined && v !== null && v !== "");
  const url = path + (given.length ? `?${new URLSearchParams(given)}` : "");
  const used = token.get();
  const headers = used ? { Authorization: `Bearer ${used}` } : {};
  let answer, found;
  try {
    answer = await fetch(url, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(30000) });
    const json = (answer.headers.get("content-type") ?? "").includes("json");
    found = json ? await answer.json() : await answer.text();
  } catch { // it is away, or stopped in the midst of its answer
    throw new Refused(0, "", "The server does not answer.");
  }
  if (found.type === "urn:kvcore:token-wrong" && used === token.get()) {
    token.set("");
    token.wrong = true;
    token.refused();
  }
  // /healthz says with 503 that something is stuck, and what
  if (!answer.ok && !found.checks) throw new Refused(answer.status, found.type ?? "", found.detail ?? answer.statusText);
  return found;
}

/** Prometheus text: name -> [{labels, value}]. */
export function samples(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
      labels[name] = value.replace(/\\(.)/g, (_, c) => c === "n" ? "\n" : c);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}
