"""A sample as lines of text."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from kvcore import __version__
from kvcore.api.units import format_size
from kvcore.cli.kit.output import cut
from kvcore.cli.top.sample import Figures, Sample, Watch

BAR = 10
HOLDS = 34
MOST_PREFIXES = 8
MOST_TENANTS = 8
MOST_MISSES = 4


class Text(NamedTuple):
    """A line, and how it is shown: a colour of `kvcore.cli.kit.output.COLOURS`, or empty."""

    text: str
    colour: str = ""


def cache(watch: Watch, sample: Sample) -> list[Text]:
    """All about one cache. One of another release may say it in other words."""
    try:
        return _cache(watch, sample)
    except (KeyError, TypeError, ValueError):
        version = (sample.status or {}).get("version")
        text = f"  its answers are not understood: it is kvcore {version}, this is kvcore {__version__}"
        return [Text(sample.label, "bold"), Text(text, "error")]


def _cache(watch: Watch, sample: Sample) -> list[Text]:
    status = sample.status
    if status is None:
        return [Text(sample.label, "bold"), Text(f"  {sample.fault}", "error")]
    assert sample.figures is not None
    where = f" of {status['address']}" if status["kind"] == "client" else f" {status['address']}".rstrip()
    up = duration(status["uptime_s"])
    lines = [Text(f"{sample.label}  {status['kind']}{where}  {up}  kvcore {status['version']}", "bold")]
    if status["connected"] is False:
        lines.append(Text("  its server is away: everything is a miss", "error"))
    lines += _rates(sample.figures, watch.total)
    lines += _record(sample.hot)
    lines += _places(status, sample.figures, watch.total)
    lines += _whose(sample.hot, watch.tenant_bytes)
    lines += _prefixes(sample.hot)
    if sample.fault:
        lines.append(Text(f"  {sample.fault}", "warning"))
    return lines


def _rates(window: Figures, total: Figures) -> list[Text]:
    """Hits and misses: of the last seconds, and since the cache was opened."""
    lines = [
        Text(f"  {'':<9}{'HIT RATE':>9}{'LOOKUPS':>10}{'MEAN':>10}{'SAVED TOKENS':>14}{'PREFILL':>10}  MISSES", "dim")
    ]
    if window.seconds:
        lines.append(Text(_rate(f"{window.seconds:.0f} s", window)))
    lines.append(Text(_rate("in all", total)))
    return lines


def _record(hot: Mapping[str, Any] | None) -> list[Text]:
    """Where the prompts on record came from: what an engine holds itself is nothing that the cache is asked for."""
    if not hot or not hot["chunks"]:
        return []
    own, found = hot["own"] / hot["chunks"], hot["found"] / hot["chunks"]
    last = "last request" if hot["requests"] == 1 else f"last {hot['requests']:,} requests"
    text = f"{own:.1%} held by the engine, {found:.1%} found here, {1 - own - found:.1%} computed"
    return [Text(f"  the {last}: {text}")]


def _rate(name: str, f: Figures) -> str:
    rate = "-" if f.hit_rate is None else f"{f.hit_rate:.1%}"
    mean = seconds(f.lookup_seconds / f.lookups) if f.lookups else "-"
    most = sorted(f.misses.items(), key=lambda item: -item[1])[:MOST_MISSES]
    misses = ", ".join(f"{reason} {count(n)}" for reason, n in most) or "-"
    if f.seconds:
        lookups, tokens = f"{f.lookups / f.seconds:.3g}/s", f"{count(f.saved_tokens / f.seconds)}/s"
    else:
        lookups, tokens = count(f.lookups), count(f.saved_tokens)
    prefill = seconds(f.saved_seconds) if f.saved_seconds else "-"
    return f"  {name:<9}{rate:>9}{lookups:>10}{mean:>10}{tokens:>14}{prefill:>10}  {misses}"


def _places(status: Mapping[str, Any], window: Figures, total: Figures) -> list[Text]:
    """L1 and the tiers, with the share of what was asked for that each had."""
    l1, tiers = status["l1"], status["tiers"]
    if l1 is None and not tiers:
        return []
    through = f"{'LOAD':>13}{'STORE':>13}{'QUEUE':>10}{'OBJECTS':>10}"
    lines = [Text(f"  {'PLACE':<12}{'STATE':<9}{'HITS':>6}  {'HOLDS':<{HOLDS}}{through}", "dim")]
    if l1 is not None:
        used = l1["size"] - l1["free"]
        holds = _filled(used, l1["size"])
        line = _place("l1", "", _share("l1", window, total), {}, window, 0, l1["objects"], holds)
        pinned = f", {l1['pinned']:,} pinned" if l1.get("pinned") else ""  # one of another release may not say
        lines.append(Text(f"{line.text}, {l1['leases']} leased{pinned}"))
    for tier in tiers:
        usage = tier["usage"] or {}
        holds, objects = "", usage.get("objects")
        if usage:
            holds = format_size(usage["nbytes"])
            if usage["capacity"]:
                holds = _filled(usage["nbytes"], usage["capacity"])
        passed = window.tiers.get(tier["name"], {})
        share = _share(tier["name"], window, total)
        line = _place(tier["name"], tier["state"], share, passed, window, tier["queue_bytes"], objects, holds)
        lines.append(line if tier["state"] == "open" else line._replace(colour="error"))
        if tier["cause"]:
            lines.append(Text(f"    {tier['cause']}", "error"))
    return lines


def _place(
    name: str,
    state: str,
    share: str,
    through: Mapping[str, float],
    window: Figures,
    queue: int,
    objects: int | None,
    holds: str,
) -> Text:
    load, store = (speed(through.get(f"{op}_bytes", 0.0), window.seconds) for op in ("load", "store"))
    waits = format_size(queue) if queue else "-"
    there = "-" if objects is None else f"{objects:,}"
    return Text(f"  {name:<12}{state:<9}{share:>6}  {holds:<{HOLDS}}{load:>13}{store:>13}{waits:>10}{there:>10}")


def _filled(used: int, size: int) -> str:
    """`[####....] 3.4 GiB of 8 GiB`."""
    return f"{bar(used, size)} {format_size(used)} of {format_size(size)}"


def _share(place: str, window: Figures, total: Figures) -> str:
    of = window if window.asked else total
    return f"{of.hits.get(place, 0.0) / of.asked:.1%}" if of.asked else "-"


def _whose(hot: Mapping[str, Any] | None, tenant_bytes: Mapping[str, float]) -> list[Text]:
    """Tenants, where anybody said one or has a quota."""
    traffic = {t["tenant"]: t for t in hot["tenants"]} if hot else {}
    held: dict[str, list[str]] = {}
    for name, nbytes in tenant_bytes.items():
        tenant, _, place = name.rpartition("/")
        held.setdefault(tenant, []).append(f"{place} {format_size(nbytes)}")
    names = [*traffic, *(t for t in held if t not in traffic)]
    if not [n for n in names if n]:
        return []
    lines = [Text(f"  {'TENANT':<24}{'REQUESTS':>10}{'REUSED':>9}{'TOKENS':>10}  HOLDS", "dim")]
    for name in names[:MOST_TENANTS]:
        t = traffic.get(name, {"requests": 0, "chunks": 0, "found": 0, "retrieved": 0})
        found = f"{t['found'] / t['chunks']:.1%}" if t["chunks"] else "-"
        shown = cut(name or "(none)", 24)
        text = (
            f"  {shown:<24}{t['requests']:>10,}{found:>9}{count(t['retrieved']):>10}  {', '.join(held.get(name, []))}"
        )
        lines.append(Text(text.rstrip()))
    return lines


def _prefixes(hot: Mapping[str, Any] | None) -> list[Text]:
    """What most requests on record have in common."""
    if not hot or not hot["prefixes"]:
        return []
    lines = [Text(f"  {'PREFIX':<14}{'TOKENS':>9}{'REQUESTS':>10}{'REUSED':>9}{'LAST':>8}  {'IN L1':<7}MODEL", "dim")]
    now = time.time()
    for p in hot["prefixes"][:MOST_PREFIXES]:
        ago = duration(max(0.0, now - datetime.fromisoformat(p["last"]).timestamp()))
        there = {True: "yes", False: "no", None: ""}[p["resident"]]
        found = f"{p['found']:.0%}"
        whose = f", {p['tenant']}" if p["tenant"] else ""
        text = f"  {p['hash'][:12]:<14}{p['tokens']:>9,}{p['requests']:>10,}{found:>9}{ago:>8}  {there:<7}"
        lines.append(Text(f"{text}{p['model']}{whose}".rstrip()))
    return lines


def screen(parts: Sequence[Sequence[Text]], width: int, height: int) -> list[Text]:
    """All caches one below the other, cut to the size of a terminal."""
    lines: list[Text] = []
    for part in parts:
        lines += [*([Text("")] if lines else []), *part]
    if len(lines) > height:
        lines = [
            *lines[: height - 1],
            Text(f"... {len(lines) - height + 1} more lines: a taller terminal shows them", "dim"),
        ]
    return [Text(cut(line.text, width), line.colour) for line in lines]


def bar(part: float, whole: float) -> str:
    """How full something is."""
    filled = min(BAR, round(BAR * part / whole)) if whole else 0
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def speed(nbytes: float, seconds_: float) -> str:
    """Bytes per second."""
    return f"{format_size(nbytes / seconds_)}/s" if nbytes and seconds_ else "-"


def count(number: float) -> str:
    """With a decimal unit, in at most five characters: `93.6M`."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5 or unit == "G":
            return f"{number:.3g}{unit}"
        number /= 1000
    raise AssertionError


def seconds(time_s: float) -> str:
    """A short time."""
    if time_s < 1e-3:
        return f"{time_s * 1e6:.0f} us"
    return f"{time_s * 1e3:.3g} ms" if time_s < 1 else f"{time_s:.3g} s" if time_s < 600 else duration(time_s)


def duration(time_s: float) -> str:
    """A long time, in its two largest units at most: `3h12m`."""
    whole = int(time_s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return (
        f"{whole // 3600}h{whole % 3600 // 60:02}m" if whole < 86400 else f"{whole // 86400}d{whole % 86400 // 3600}h"
    )
