// Numbers, times and names as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes: `1.5 GiB`. */
export function size(nbytes) {
  if (nbytes === null || nbytes === undefined) return "–";
  let at = 0;
  while (Math.abs(nbytes) >= 1024 && at < UNITS.length - 1) { nbytes /= 1024; at++; }
  return `${at ? short(nbytes) : Math.round(nbytes)} ${UNITS[at]}`;
}

/** Three significant digits. */
export const short = (n) => n === 0 ? "0" : Math.abs(n) >= 100 ? String(Math.round(n)) : String(+n.toPrecision(3));

/** A number with separators; large ones shortened. */
export function count(n) {
  if (n === null || n === undefined) return "–";
  if (Math.abs(n) >= 1e9) return `${short(n / 1e9)} G`;
  if (Math.abs(n) >= 1e7) return `${short(n / 1e6)} M`;
  return (Math.abs(n) >= 100 ? Math.round(n) : +n.toPrecision(3)).toLocaleString("en");
}

/** A share of 1: `83 %`; a dash where there is nothing to share. */
export const percent = (share) => share === null || Number.isNaN(share) ? "–" : `${short(share * 100)} %`;

/** Seconds: `1.2 ms`, `3 min`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${short(seconds * 1e6)} µs`;
  if (seconds < 1) return `${short(seconds * 1e3)} ms`;
  if (seconds < 120) return `${short(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const since = (at) => Math.max(0, Date.now() / 1000 - seconds(at));

/** A time, as ISO text or seconds of the epoch, in seconds. */
export const seconds = (at) => typeof at === "number" ? at : Date.parse(at) / 1000;

/** For how long it has been so. */
export const age = (at) => duration(Math.round(since(at)));

/** How long ago a time was. */
export function ago(at) {
  if (at === null || at === undefined) return "–";
  return since(at) < 1 ? "now" : `${age(at)} ago`;
}

/** The time of day, with the date where it is not today's. */
export function clock(at) {
  const date = new Date(seconds(at) * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}

/** The front of a long name. */
export const brief = (name, most = 12) => name.length > most ? `${name.slice(0, most)}…` : name;

/** `1 chunk`, `2 chunks`. */
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
