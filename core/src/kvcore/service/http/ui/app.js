// The frame: which view is shown, the token, the theme, and when a view is brought up to date.

import { ask, Refused, token } from "./api.js";
import { badge, h, morph } from "./dom.js";
import { clock } from "./words.js";
import * as config from "./config.js";
import * as history from "./history.js";
import * as now from "./now.js";
import * as objects from "./objects.js";
import * as plugins from "./plugins.js";
import * as prefixes from "./prefixes.js";
import * as requests from "./requests.js";

const VIEWS = { now, history, requests, prefixes, objects, plugins, config };
const $ = (id) => document.getElementById(id);
const main = $("main");
const AWAY_S = 3; // so often a server that does not answer is asked again
const GREET_S = 5;
let turn = 0;
let timer;
let greeting;

/** The view of the address, `#/prefixes/a/b`, and its words. */
function wanted() {
  const [name, ...words] = location.hash.replace(/^#\/?/, "").split("/").map(plain);
  return [name in VIEWS ? name : "now", words];
}

function plain(word) {
  try {
    return decodeURIComponent(word);
  } catch { // somebody has typed a `%`
    return word;
  }
}

/** Show the view of the address; again, as often as it wants. */
async function show(moved) {
  const mine = ++turn;
  clearTimeout(timer);
  const [name, words] = wanted();
  const view = VIEWS[name];
  if (moved) {
    document.title = `${view.title} · kvcore`;
    delete main.dataset.view; // it is there once the view is
    morph($("nav"), h("nav", {}, links(name)));
    main.replaceChildren(h("h1", { text: view.title }), h("p", { class: "muted", text: "…" }));
  }
  let found, every = view.every;
  try {
    const data = await view.load(words);
    if (mine !== turn) return;
    found = view.show(data, words, again);
    state(`As of ${clock(Date.now() / 1000)}${view.every ? `, every ${view.every} s` : ""}`);
  } catch (error) {
    if (mine !== turn) return;
    if (!(error instanceof Refused)) throw error;
    found = refused(error);
    every ||= error.status === 0 ? AWAY_S : 0;
    state(error.message);
  }
  const intro = view.intro ? h("p", { class: "intro", text: view.intro }) : null;
  const fresh = h("main", {}, h("h1", { text: view.title }), intro, found);
  if (moved || !view.every) main.replaceChildren(...fresh.childNodes);
  else morph(main, fresh);
  main.dataset.view = name;
  if (every && !document.hidden) timer = setTimeout(again, every * 1000);
}

const again = () => show(false);
const state = (text) => { $("state").textContent = text; };

function links(current) {
  return Object.entries(VIEWS).map(([name, view]) =>
    h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null, text: view.title }));
}

/** Why nothing is shown, and what to do. */
function refused(error) {
  if (error.status === 403) return h("p", { class: "notice", text: error.message });
  if (error.locked) return h("p", { class: "notice" }, "This needs the server's token: ", h("a", { href: "#token-field", text: "give it above" }), ".");
  if (error.status === 0) return h("p", { class: "notice bad", text: "The server does not answer. This page goes on trying." });
  return h("p", { class: "notice bad", text: error.message });
}

/** Who it is and how it is, in the header; on its own, as it is there in every view. */
async function greet() {
  clearTimeout(greeting);
  try {
    const [status, health] = await Promise.all([ask("status"), ask("healthz")]);
    $("who").textContent = `${status.version} · ${status.address || `process ${status.pid}`}`;
    const kind = { ok: "ok", degraded: "warn", stuck: "bad" }[health.status];
    $("health").replaceChildren(badge(health.status, kind));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("health").replaceChildren(badge(error.locked ? "locked" : "away", error.locked ? "warn" : "bad"));
  }
  clearTimeout(greeting);
  if (!document.hidden) greeting = setTimeout(greet, GREET_S * 1000);
}

function tokens() {
  const kept = Boolean(token.get());
  $("token").hidden = kept;
  $("token-kept").hidden = !kept;
  $("token-said").textContent = token.wrong ? "That is not the server's token." : "";
}
token.refused = () => {
  tokens();
  if (document.activeElement === document.body) $("token-field").focus();
};

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("token-field").value.trim());
  $("token-field").value = "";
  tokens();
  greet();
  show(true);
});
$("token-forget").addEventListener("click", () => {
  token.set("");
  tokens();
  $("token-field").focus();
  show(true);
});
document.addEventListener("click", (event) => { // a link to the field is no address of a view
  if (event.target.closest?.("a[href='#token-field'], a.skip") === null) return;
  event.preventDefault();
  (event.target.closest("a.skip") ? main : $("token-field")).focus();
});

const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

function theme(name) {
  root.style.colorScheme = name ?? "light dark";
  const now = name ?? (dark.matches ? "dark" : "light");
  $("theme").textContent = now === "dark" ? "Light" : "Dark";
  $("theme").onclick = () => {
    const other = now === "dark" ? "light" : "dark";
    sessionStorage.setItem("kvcore-theme", other);
    theme(other);
  };
}

addEventListener("hashchange", () => { show(true); main.focus(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) { show(false); greet(); } });
dark.addEventListener("change", () => theme(sessionStorage.getItem("kvcore-theme")));
theme(sessionStorage.getItem("kvcore-theme"));
tokens();
greet();
show(true);
