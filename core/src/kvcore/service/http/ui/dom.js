// Elements, and how a view is brought up to date without losing focus, scroll position or what is unfolded.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: `text`, `class`, `style` (by property), `on` (listeners by event), else attributes. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(el, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") el.textContent = value;
    else if (name === "style") Object.assign(el.style, value);
    else if (name === "on") for (const [event, listen] of Object.entries(value)) el.addEventListener(event, listen);
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

/** Make the children of `old` those of `fresh`, changing only what differs. Listeners of kept elements stay. */
export function morph(old, fresh) {
  const wanted = [...fresh.childNodes];
  const there = [...old.childNodes];
  wanted.forEach((node, i) => {
    const before = there[i];
    if (!before) old.append(node);
    else if (before.nodeName !== node.nodeName || before.nodeType !== node.nodeType || key(before) !== key(node))
      before.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (before.data !== node.data) before.data = node.data;
    } else {
      attributes(before, node);
      morph(before, node);
    }
  });
  there.slice(wanted.length).forEach((node) => node.remove());
}

const key = (node) => node.dataset?.key;

function attributes(before, node) {
  for (const { name } of [...before.attributes])
    if (!node.hasAttribute(name) && !(before.nodeName === "DETAILS" && name === "open")) before.removeAttribute(name);
  for (const { name, value } of node.attributes)
    if (name !== "style" && before.getAttribute(name) !== value) before.setAttribute(name, value);
  if (before.style && before.style.cssText !== node.style.cssText) before.style.cssText = node.style.cssText;
}

/** A table in a region of its own that scrolls. `columns`: [title, "" or "n" for numbers]; cells: text or elements. */
export function table(caption, columns, rows, empty = "Nothing.") {
  if (!rows.length) return h("p", { class: "muted", text: empty });
  const cell = (value, [, kind], tag) =>
    value instanceof Node ? h(tag, { class: kind }, value) : h(tag, { class: kind, text: value });
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", {},
      h("caption", { class: "hidden", text: caption }),
      h("thead", {}, h("tr", {}, columns.map(([title, kind]) => title ? h("th", { scope: "col", class: kind, text: title }) : h("td")))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, i) =>
        i ? cell(value, columns[i], "td") : fill(cell(value, columns[0], "th"), { scope: "row" }, [])))))));
}

/** A part of a view with its heading. */
export function part(title, ...children) {
  return h("section", { class: "part" }, h("h2", { text: title }), ...children);
}

/** A word with a colour; the word alone says it, too. `kind`: ok, warn, bad or "". */
export function badge(word, kind = "") {
  return h("span", { class: `badge ${kind}`, text: word });
}

/** A bar of parts: [share of 1, class, name]. What they sum up to is said in `label`. */
export function bar(label, parts) {
  return h("div", { class: "bar", role: "img", "aria-label": label, title: label },
    parts.map(([share, kind]) => h("span", { class: kind, style: { width: `${Math.max(0, Math.min(1, share)) * 100}%` } })));
}
