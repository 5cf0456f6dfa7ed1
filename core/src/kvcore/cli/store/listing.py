"""`kvcore store ls` and `stat`."""

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any

from kvcore.api import Entry, format_size
from kvcore.cli.kit.opened import Source, chosen, tier_path
from kvcore.cli.kit.output import paint, table
from kvcore.cli.kit.progress import Progress
from kvcore.cli.store.walk import entries_of, expected
from kvcore.cli.store.whose import owners
from kvcore.l2.frames import CannotList, Frames


@dataclass
class _Namespace:
    """What one namespace holds."""

    objects: int = 0
    nbytes: int = 0
    groups: set[int] = field(default_factory=set)
    used_s: float | None = None

    def add(self, entry: Entry) -> None:
        self.objects += 1
        self.nbytes += entry.nbytes
        self.groups.add(entry.key.group)
        if entry.used_s is not None:
            self.used_s = max(self.used_s or 0.0, entry.used_s)


async def ls(frames: Frames, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """JSON: {namespaces: [{namespace, objects, bytes, groups, last_used_s, model, tenant}], objects, bytes}. Model and
    tenant are null where they are not known, see `owners`.

    With `--long`, each object goes to stdout as it is found, as JSON so: {tier, namespace, group, hash, bytes,
    last_used_s}.
    """
    found: dict[bytes, _Namespace] = {}
    if not args.json:
        print(paint(f"tier {frames.name}", "bold"))
    with Progress(f"listing {frames.name}", await expected(frames, args.namespace)) as progress:
        async for entries in entries_of(frames, args.namespace):
            for entry in entries:
                found.setdefault(entry.key.namespace, _Namespace()).add(entry)
                if args.long:
                    progress.say(_line(frames.name, entry, as_json=args.json))
            progress.add(len(entries))
    known = owners(found) if found and not (args.long and args.json) else {}
    if not args.json:
        _show(found, known)
    return {
        "namespaces": [
            {
                "namespace": name.hex(),
                "objects": n.objects,
                "bytes": n.nbytes,
                "groups": len(n.groups),
                "last_used_s": n.used_s,
                "model": known[name][0] if name in known else None,
                "tenant": known[name][1] if name in known else None,
            }
            for name, n in _by_size(found)
        ],
        "objects": sum(n.objects for n in found.values()),
        "bytes": sum(n.nbytes for n in found.values()),
    }


async def stat(frames: Frames, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """JSON: {objects, bytes, capacity_bytes, namespaces, path}; each null where nobody can tell. The capacity is the
    storage's, or else the tier's."""
    usage = await frames.usage()
    found: dict[bytes, _Namespace] = {}
    listed = True
    try:
        with Progress(f"listing {frames.name}", usage.objects if usage else None) as progress:
            async for entries in frames.entries():
                for entry in entries:
                    found.setdefault(entry.key.namespace, _Namespace()).add(entry)
                progress.add(len(entries))
    except CannotList:
        listed = False
    counted = {
        "objects": sum(n.objects for n in found.values()) if listed else None,
        "bytes": sum(n.nbytes for n in found.values()) if listed else None,
        "capacity_bytes": None,
        "namespaces": len(found) if listed else None,
    }
    if usage is not None:
        counted |= {"objects": usage.objects, "bytes": usage.nbytes, "capacity_bytes": usage.capacity_bytes}
    (tier,) = chosen(source.config, [frames.name])
    if counted["capacity_bytes"] is None:
        counted["capacity_bytes"] = tier.capacity
    path = tier_path(tier)
    return counted | {"path": None if path is None else str(path)}


def show_stat(tiers: list[dict[str, Any]]) -> None:
    """The table of `stat`."""
    rows = []
    for tier in tiers:
        if "objects" not in tier:
            continue  # an error, which stands on stderr
        nbytes, capacity = tier["bytes"], tier["capacity_bytes"]
        used = f"{100 * nbytes / capacity:.1f} %" if capacity and nbytes is not None else "-"
        rows.append(
            (tier["tier"], tier["storage"], _count(tier["objects"]), _size(nbytes), _size(capacity), used,
             _count(tier["namespaces"]), tier["path"] or "-")
        )  # fmt: skip
    table(("TIER", "STORAGE", "OBJECTS", "BYTES", "CAPACITY", "USED", "NAMESPACES", "PATH"), rows)


def _by_size(found: dict[bytes, _Namespace]) -> list[tuple[bytes, _Namespace]]:
    return sorted(found.items(), key=lambda item: (-item[1].nbytes, item[0]))


def _show(found: dict[bytes, _Namespace], known: dict[bytes, tuple[str, str]]) -> None:
    rows = [
        (name.hex(), _count(n.objects), _size(n.nbytes), str(len(n.groups)), _time(n.used_s),
         ", ".join(filter(None, known.get(name, ("-",)))))
        for name, n in _by_size(found)
    ]  # fmt: skip
    total = (
        f"{len(found)} {'namespace' if len(found) == 1 else 'namespaces'}",
        _count(sum(n.objects for n in found.values())),
        _size(sum(n.nbytes for n in found.values())),
        "",
        "",
        "",
    )
    table(("NAMESPACE", "OBJECTS", "BYTES", "GROUPS", "LAST USED", "MODEL"), [*rows, total])


def _line(tier: str, entry: Entry, *, as_json: bool) -> str:
    key = entry.key
    if as_json:
        fields = {
            "tier": tier,
            "namespace": key.namespace.hex(),
            "group": key.group,
            "hash": key.chunk_hash.hex(),
            "bytes": entry.nbytes,
            "last_used_s": entry.used_s,
        }
        return json.dumps(fields)
    return f"{key.namespace.hex()} {key.group:x} {key.chunk_hash.hex()}  {format_size(entry.nbytes):>10}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
