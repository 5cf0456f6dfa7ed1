"""The pictures of pages, in docs/pictures/: drawn out of the code where it says what they show.

`docs/generate.py` writes them and checks that they are up to date.
"""

import re
import struct
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from drawing import Box, Drawing

from kvcore.api import KeySource
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES, NAMESPACE_BYTES
from kvcore.builtin.keys_tokens import TokenKeys
from kvcore.engine import ModelSpec
from kvcore.l2 import frame
from kvcore.plugins.known import BUILTINS, PACKAGES

ROOT = Path(__file__).resolve().parents[1]


def _names(kind: str) -> list[str]:
    """Of first-party plugins: built-ins, then packages. Test kits are none."""
    built_in = [n for n, module in BUILTINS.get(kind, {}).items() if not module.startswith("kvcore.testing")]
    return [*built_in, *(name for of, name in PACKAGES if of == kind)]


def _row(drawing: Drawing, box: Box, names: Sequence[str], kind: str) -> None:
    """Names side by side within a box."""
    gap, width = 8, (box.width - 8 * (len(names) + 1)) / len(names)
    for i, name in enumerate(names):
        drawing.box(Box(box.x + gap + i * (width + gap), box.y, width, box.height), [name], kind)


def stack() -> str:
    """What stands on what."""
    d = Drawing(900, 452, "Engines stand on two faces, these on the cache, and the cache on serdes and storages.")
    for y, label in ((18, "engines"), (106, "faces"), (206, "the cache"), (294, "serdes"), (374, "storages")):
        d.text(12, y + 26, label, "faint")
    width = 900 - 130
    _row(d, Box(110, 20, width + 8, 40), _names("engine"), "engine")
    left, right = Box(118, 102, 377, 52), Box(503, 102, 377, 52)
    d.box(left, ["Engine", "for engines that hand over their paged KV"], "core")
    d.box(right, ["ObjectStore", "for engines that own host memory"], "core")
    cache = d.box(Box(118, 192, 762, 72), (), "core")
    parts = {
        "L1": "host memory",
        "lookup": "leases, deadlines",
        "keys": ", ".join(_names("keys")),
        "eviction": ", ".join(_names("eviction")),
        "hooks": ", ".join(_names("hooks")),
    }
    widths, x = (98, 122, 104, 196, 170), cache.x + 12
    for (name, text), wide in zip(parts.items(), widths, strict=True):
        d.box(Box(x, 204, wide, 48), [name, text], "plain")
        x += wide + 12
    _row(d, Box(110, 296, width + 8, 40), _names("serde"), "bytes")
    _row(d, Box(110, 376, width + 8, 40), _names("storage"), "store")
    for share in (0.25, 0.75):
        x = 118 + 762 * share
        d.arrow((x, 60), (x, 102), both=True).arrow((x, 154), (x, 192), both=True)
    d.arrow((499, 264), (499, 296), both=True).arrow((499, 336), (499, 376), both=True)
    d.text(118, 440, "All but the faces, L1 and lookup are plugins. Any storage works under any engine.", "faint")
    return d.svg()


_JOBS = {
    "cli": "the command line",
    "testing": "suites that plugin authors inherit",
    "service": "the cache across processes: server, clients, HTTP",
    "explain": "why a prompt was or was not a hit",
    "engine": "the two faces, over a cache in this process",
    "control": "what is loaded, stored, spilt, reaped",
    "l1": "host memory",
    "l2": "tiers",
    "transfer": "copies",
    "tenants": "quotas, shares, who gives",
    "builtin": "built-in plugins",
    "config": "YAML, environment, flags: one model",
    "plugins": "found, loaded",
    "observe": "metrics, logs, records",
    "api": "what plugin authors import",
}


def layers() -> str:
    """The import contract of the core, and what plugins may import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rows,) = (c["layers"] for c in contracts if c["type"] == "layers" and c["layers"][0] == "kvcore.cli")
    plugins = ("storage, serde,", "hooks, keys, eviction"), ("engine", "plugins")
    uses = ({"api"}, {"api", "transfer", "engine", "service"})
    tests = ({"testing"}, {"testing"})
    height = 62 + 42 * len(rows) + 36
    d = Drawing(
        900, height, "The layers of the core, each importing only what stands below it, and what plugins import."
    )
    d.text(20, 40, "A module imports only what stands below it.", "faint")
    for i, lines in enumerate(plugins):
        for j, line in enumerate(lines):
            d.text(694 + i * 140, 24 + j * 16, line, "small", "middle")
    for i, row in enumerate(rows):
        names = [name.strip().removeprefix("kvcore.") for name in row.split("|")]
        y, gap = 54 + 42 * i, 8
        width = (600 - gap * (len(names) - 1)) / len(names)
        for j, name in enumerate(names):
            box = Box(20 + j * (width + gap), y, width, 36)
            d.box(box, kind="core" if name != "api" else "store")
            words = f"kvcore.{name}" if len(names) == 1 else name
            d.text(box.x + 10, y + 23, words, "mono")
            d.text(
                box.x + box.width - 10, y + 23, _JOBS.get(name, ""), "small", "end", box.width - 25 - 7.4 * len(words)
            )
        for k in range(2):
            mark = "imports" if uses[k] & set(names) else "in tests" if tests[k] & set(names) else ""
            if mark:
                d.box(Box(694 + k * 140 - 44, y + 5, 88, 26), kind="store" if mark == "imports" else "plain")
                d.text(694 + k * 140, y + 22, mark, "small", "middle")
    y = 54 + 42 * len(rows) + 22
    d.text(20, y, "Plugins are packages of their own, and none imports another.", "faint")
    return d.svg()


def prefix() -> str:
    """How prompts are cut and named, with the hashes that `keys: tokens` gives."""
    words = ["You", "are", "a", "poet", ".", "Answer", "in", "one", "line", ".", "Who", "wrote", "Emma", "?"]
    other = [*words[:7], "two", *words[8:]]
    size, ids = 3, {word: i for i, word in enumerate(dict.fromkeys([*words, *other]))}
    keys = TokenKeys(None, None)
    d = Drawing(
        900,
        332,
        "Two prompts in chunks. A chunk's hash covers all before it, so one other token changes all that follow.",
    )
    chunks: list[list[bytes]] = []
    for y, name, prompt in ((34, "stored", words), (166, "asked for", other)):
        hashes = keys.extend(KeySource(size, size, [ids[word] for word in prompt]))
        chunks.append(hashes)
        d.text(12, y + 20, name, "bold")
        for i, word in enumerate(prompt):
            x = 92 + i * 50 + (i // size) * 22
            changed = prompt is other and word != words[i]
            d.box(Box(x, y, 48, 30), kind="gone" if changed else "plain")
            d.text(x + 24, y + 19, word, "small", "middle", 48)
        for i, digest in enumerate(hashes):
            x, found = 92 + i * (size * 50 + 22), digest in chunks[0]
            box = d.box(Box(x, y + 54, size * 50 - 2, 32), kind="store" if found else "gone")
            d.text(x + box.width / 2, y + 74, f"{digest.hex()[:12]}…", "mono", "middle", box.width)
            d.arrow((x + box.width / 2, y + 30), box.at("top"))
            if i:
                d.arrow((x - 24, y + 70), box.at("left"))
            if prompt is other:
                d.text(x + box.width / 2, y + 104, "hit" if found else "miss", "small", "middle")
        d.text(92 + len(hashes) * (size * 50 + 22), y + 74, "no whole chunk", "small faint")
    d.text(92, 22, f"Chunks of {size} tokens here; of 16 to 256 in an engine.", "small faint")
    d.text(
        92,
        300,
        "One token of the third chunk differs. So does that chunk's hash, and that of the fourth, whose tokens do not:",
        "small",
    )
    d.text(
        92,
        317,
        "the KV of a token depends on all tokens before it. What is reused is a common prefix of whole chunks.",
        "small",
    )
    return d.svg()


def names() -> str:
    """What an object's name is made of."""
    d = Drawing(900, 300, "The name of an object: a namespace, the hash of a chunk, and a group.")
    space = d.box(Box(20, 20, 420, 54), ["namespace", f"{NAMESPACE_BYTES} bytes"], "core")
    chunk = d.box(
        Box(448, 20, 300, 54), ["chunk hash", f"{MIN_HASH_BYTES} to {MAX_HASH_BYTES} bytes, usually 32"], "bytes"
    )
    group = d.box(Box(756, 20, 124, 54), ["group", "a number"], "plain")
    rest = [f.name for f in fields(ModelSpec) if f.name not in ("groups", "extra", "parallel")]
    rest += [
        "parallel sizes",
        "groups: layers, windows",
        "chunk_tokens",
        "key scheme",
        "lossy serdes",
        "salt",
        "tenant",
    ]
    per, wide = 3, 134
    for i, name in enumerate(rest):
        x, y = 20 + (i % per) * (wide + 9), 114 + (i // per) * 27
        d.box(Box(x, y, wide, 23), kind="plain")
        d.text(
            x + wide / 2, y + 16, name.replace("groups: layers, windows", "layers, windows"), "small", "middle", wide
        )
    d.arrow((space.x + 210, 108), space.at("bottom"))
    lines = [
        "tokens of this chunk, and of all before it",
        "what else they depend on: LoRA, images,",
        "the engine's own salt",
    ]
    for i, line in enumerate(lines):
        d.text(chunk.x + 8, 130 + i * 19, line, "small", room=300)
    d.arrow((chunk.x + 150, 112), chunk.at("bottom"))
    for i, line in enumerate(("0 for most; models", "with windows", "have several")):
        d.text(group.x + 4, 130 + i * 19, line, "small", room=132)
    d.arrow((group.x + 62, 112), group.at("bottom"))
    d.text(462, 220, "Whatever KV must not be mixed across is in the name.", "bold")
    d.text(462, 240, "So nothing wrong can be found, and nothing must be", "small")
    d.text(462, 256, "invalidated: what differs in any part is another object.", "small")
    return d.svg()


_FIELDS = (
    "magic",
    "version",
    "header bytes",
    "",
    "payload bytes",
    "group",
    "hash bytes",
    "stages",
    "namespace",
    "checksum of payload",
)


def stored() -> str:
    """A frame, field by field, out of its struct."""
    d = Drawing(900, 262, "A stored object: a header of a page, with its checksums, and the payload.")
    header = Box(20, 44, 600, 64)
    d.box(header, (), "core")
    d.text(header.x, 34, f"header: {frame.HEADER_BYTES:,} bytes, so that the payload is page-aligned", "small")
    d.box(Box(628, 44, 252, 64), ["payload", "[rank][layer][block], as the chain", "of serdes has encoded it"], "bytes")
    d.text(628, 34, "what the engine computed", "small")
    parts = (("fixed fields", 190), ("chunk hash", 110), ("serdes", 90), ("zeros", 70), ("checksum", 100))
    x = header.x + 8
    for name, wide in parts:
        d.box(Box(x, 56, wide, 40), [name], "plain" if name != "zeros" else "frame")
        x += wide + 6
    found = re.findall(r"(\d*)([a-zA-Z])", frame._FIXED.format.lstrip("<"))
    sizes = [struct.calcsize(f"<{count}{code}") for count, code in found]
    padding = [i for i, (_, code) in enumerate(found) if code == "x"]
    sizes[padding[0] : padding[-1] + 1] = [sum(sizes[i] for i in padding)]
    offset, rows = 0, []
    for name, size in zip(_FIELDS, sizes, strict=True):
        rows.append((offset, size, name or "zeros"))
        offset += size
    x, wide = 20, 860 / len(rows)
    d.line((28, 96), (20, 150)).line((218, 96), (880, 150))
    for at, size, name in rows:
        d.box(Box(x, 150, wide - 4, 58), kind="plain")
        first, _, second = name.partition(" of " if " of " in name else " ")
        second = f"of {second}" if " of " in name else second
        for i, word in enumerate(filter(None, (first, second))):
            d.text(x + (wide - 4) / 2, 172 + 15 * i, word, "small", "middle", wide)
        d.text(x + (wide - 4) / 2, 226, f"{at}: {size} B", "small faint", "middle", wide)
        x += wide
    d.text(20, 252, "Whatever does not match is a miss, whichever tier it came from.", "small")
    return d.svg()


def planes() -> str:
    """A cache in an engine's process."""
    d = Drawing(
        900,
        430,
        "The control plane, in the engine's scheduler, plans; the data plane, in its workers, copies.",
    )
    d.box(Box(16, 30, 440, 262), (), "frame")
    d.text(26, 22, "engine's scheduler process", "small")
    d.box(Box(560, 30, 324, 262), (), "frame")
    d.text(570, 22, "engine's worker processes, one per rank", "small")
    head = d.box(Box(32, 46, 408, 46), ["connector, scheduler half", "lookup, retrieve, reserve, publish"], "engine")
    cache = d.box(Box(32, 122, 408, 154), ["CacheEngine"], "core", top=True)
    d.box(Box(44, 152, 186, 52), ["L1's table", "leases, eviction, tenants"], "plain")
    d.box(Box(242, 152, 186, 52), ["controllers", "fetch, store, spill, reap"], "plain")
    tiers = d.box(Box(44, 214, 384, 50), ["tiers", "serdes, deadlines, circuit breaker, capacity"], "plain")
    work = d.box(Box(576, 46, 292, 46), ["connector, worker half", "PagedCache"], "engine")
    paged = d.box(Box(576, 122, 292, 46), ["paged KV", "blocks, on the device"], "engine")
    arena = d.box(Box(576, 222, 292, 54), ["arena", "host memory, cut into slots"], "bytes")
    d.arrow(head.at("bottom"), cache.at("top"), both=True)
    d.arrow((440, 62), (576, 62), words="plan: slots, ids").arrow((576, 80), (440, 80), words="done", shift=14)
    d.arrow(work.at("bottom"), paged.at("top"), both=True)
    d.arrow(paged.at("bottom"), arena.at("top"), kind="bytes", both=True)
    d.arrow(tiers.at("right"), (576, 239), kind="bytes", both=True)
    d.text(26, 322, "storages", "small")
    d.box(Box(16, 330, 868, 56), (), "frame")
    _row(d, Box(20, 340, 860, 36), _names("storage"), "store")
    d.arrow(tiers.at("bottom"), (236, 330), kind="bytes", both=True)
    d.line((28, 412), (68, 412), style="line bytes").text(76, 416, "bytes of KV", "small")
    d.line((190, 412), (230, 412)).text(238, 416, "messages: no KV in them, a few integers per object", "small")
    return d.svg()


def machine() -> str:
    """One cache for a machine."""
    d = Drawing(900, 372, "Engines talk to the server over a socket; their workers map its arena and copy themselves.")
    for i, name in enumerate(("engine A", "engine B")):
        y = 36 + i * 150
        d.box(Box(16, y, 360, 128), (), "frame")
        d.text(26, y - 8, name, "small")
        client = d.box(Box(30, y + 14, 160, 46), ["RemoteEngine", "in the scheduler"], "engine")
        d.box(Box(204, y + 68, 160, 46), ["workers", "paged KV"], "engine")
        d.arrow((190, y + 28), (520, 100 + i * 40))
        d.arrow((364, y + 91), (520, 226 + i * 26), kind="bytes", both=True)
        d.arrow((client.x + 80, y + 60), (client.x + 80, y + 92), (204, y + 92))
        d.text(client.x + 112, y + 86, "plans", "small")
    d.text(388, 78, "messages", "small")
    d.box(Box(504, 36, 380, 278), (), "frame")
    d.text(514, 28, "kvcore serve", "small")
    d.box(Box(520, 52, 348, 104), ["Server: one thread", "a session for each engine"], "core", top=True)
    d.box(Box(536, 98, 316, 48), ["CacheEngine", "L1's table, controllers"], "plain")
    arena = d.box(Box(520, 204, 200, 74), ["arena", "mapped by all workers"], "bytes")
    tiers = d.box(Box(752, 204, 116, 74), ["tiers", "any storages"], "store")
    d.arrow((620, 156), (620, 204)).arrow((810, 156), (810, 204))
    d.arrow(arena.at("right"), tiers.at("left"), kind="bytes", both=True)
    d.text(520, 300, "Its memory is handed over the socket.", "small faint")
    d.line((28, 350), (68, 350), style="line bytes").text(76, 354, "bytes of KV, copied by workers and tiers", "small")
    d.line((380, 350), (420, 350)).text(428, 354, "messages of hashes and places", "small")
    return d.svg()


def request() -> str:
    """A cold request, and a hot one."""
    d = Drawing(900, 560, "A cold request computes and stores; a hot one finds, loads and computes only the rest.")
    lanes = {"engine": 90, "cache": 350, "worker": 610, "tiers": 820}
    for name, x in lanes.items():
        kind = {"engine": "engine", "worker": "engine", "tiers": "store", "cache": "core"}[name]
        d.box(Box(x - 66, 10, 132, 30), [name], kind)
        d.line((x, 40), (x, 544), style="grid")
    y = 66

    def step(begin: str, end: str, words: str, kind: str = "", down: int = 31) -> None:
        nonlocal y
        d.arrow((lanes[begin], y), (lanes[end], y), words=words, kind=kind)
        y += down

    def note(lane: str, words: str, down: int = 30) -> None:
        nonlocal y
        d.text(lanes[lane] + 8, y, words, "small faint")
        y += down

    d.text(12, y, "cold", "bold")
    step("engine", "cache", "lookup: the chunks' hashes")
    step("cache", "engine", "nothing")
    note("engine", "computes the prompt")
    step("engine", "cache", "reserve: slots, a write lease")
    step("engine", "worker", "plan", down=33)
    note("worker", "copies KV into the slots", 24)
    step("engine", "cache", "publish, when every rank has")
    step("cache", "tiers", "written in the background", "bytes", 24)
    d.line((12, y), (888, y), style="frame")
    y += 32
    d.text(12, y, "hot", "bold")
    step("engine", "cache", "lookup: the chunks' hashes")
    step("cache", "tiers", "all asked at once for what L1 lacks", down=33)
    step("tiers", "cache", "loaded into slots, within lookup_timeout", "bytes", 33)
    step("cache", "engine", "so many tokens, leased")
    step("engine", "worker", "plan", down=33)
    note("worker", "copies slots into blocks", 24)
    step("engine", "cache", "release")
    note("engine", "computes the rest", 0)
    return d.svg()


def life() -> str:
    """The states of an object in L1."""
    d = Drawing(900, 330, "The states of an object in L1: absent, staging, resident, and how it leaves.")
    absent = d.box(Box(30, 120, 140, 60), ["absent", "a miss"], "plain")
    staging = d.box(Box(330, 120, 160, 60), ["staging", "slot, write lease"], "bytes")
    resident = d.box(Box(670, 120, 190, 60), ["resident", "in the table: n readers"], "store")
    quarantine = d.box(Box(330, 246, 160, 60), ["quarantined", "given to nobody"], "gone")
    hidden = d.box(Box(670, 246, 190, 60), ["unfindable", "for its last reader only"], "gone")
    d.arrow(absent.at("right", 0.35), staging.at("left", 0.35), words="reserve, or a load")
    d.arrow(staging.at("left", 0.8), absent.at("right", 0.8), words="abandoned", shift=14)
    d.arrow(staging.at("right"), resident.at("left"), words="publish: copy complete")
    d.arrow((690, 120), (690, 62), (100, 62), (100, 120), words="evicted, deleted, its ttl over: only with no reader")
    d.arrow(staging.at("bottom"), quarantine.at("top"))
    d.text(418, 216, "lease ran out", "small")
    d.arrow(quarantine.at("left"), (100, 276), (100, 180))
    d.text(118, 268, "its holder answered", "small")
    d.arrow(resident.at("bottom"), hidden.at("top"))
    d.text(774, 216, "ttl over while read", "small")
    d.arrow((765, 306), (765, 318), (60, 318), (60, 180))
    d.text(560, 312, "the last one left", "small")
    d.arrow((730, 120), (730, 92), (840, 92), (840, 120))
    d.text(712, 86, "lookup: n + 1; release: n - 1", "small")
    return d.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "stack": stack,
    "layers": layers,
    "prefix": prefix,
    "names": names,
    "stored": stored,
    "planes": planes,
    "machine": machine,
    "request": request,
    "life": life,
}
