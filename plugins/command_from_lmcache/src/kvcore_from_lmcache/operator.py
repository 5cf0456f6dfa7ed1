"""The resources of LMCache's Kubernetes operator: `LMCacheEngine` and `CacheBlendEngine` as flags of its server."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.config.tree import Tree
from kvcore_from_lmcache.draft import Setting
from kvcore_from_lmcache.sources import PREFIX, Found, from_environment, line_of, over
from kvcore_from_lmcache.words import Word, from_words

KINDS = ("LMCacheEngine", "CacheBlendEngine")
COORDINATOR = "LMCacheCoordinator"
FLAGS = {
    "server.port": "port",
    "server.httpPort": "http-port",
    "server.chunkSize": "chunk-size",
    "server.maxWorkers": "max-workers",
    "server.hashAlgorithm": "hash-algorithm",
    "l1.sizeGB": "l1-size-gb",
    "eviction.policy": "eviction-policy",
    "eviction.triggerWatermark": "eviction-trigger-watermark",
    "eviction.evictionRatio": "eviction-ratio",
    "prometheus.port": "prometheus-port",
    "l2Backend.storePolicy": "l2-store-policy",
    "l2Backend.prefetchPolicy": "l2-prefetch-policy",
    "l2Backend.prefetchMaxInFlight": "l2-prefetch-max-in-flight",
    "logLevel": "log-level",
    "isolatedIPC": "isolated-ipc",
}
PARTS = ("server", "l1", "eviction", "prometheus", "l2Backend")
"""Of the `spec`, what has settings of its own."""
ADAPTERS = {
    "host": "host",
    "port": "port",
    "numWorkers": "num_workers",
    "maxCapacityGB": "max_capacity_gb",
    "authSecretRef": "password",
}
"""Of `l2Backend.resp`."""
WHY_NOT = (
    (r"l2Backend\..*", "no part of a kvcore tier"),
    (r"prometheus\..*", "kvcore serves metrics where `metrics_port` says; who reads them is the cluster's matter"),
    (r"pd(\..*)?", "prefill and decode apart need no setting here: docs/server.md#prefill-and-decode-apart"),
    (r"blend(\..*)?", "kvcore reuses prefixes only: it never changes what a model computes"),
    (r"coordinator(\..*)?", "kvcore has no coordinator: a tier that all machines reach is what they share"),
    (r"injection(\..*)?", "kvcore changes no pods: its engines' images have kvcore-vllm, and `server:` in their file"),
)  # fmt: skip
OF_THE_POD = "of the pod, not of the cache: write it into the manifest that runs `kvcore serve`"


def settings(tree: Tree) -> Found:
    """What stands in the `spec`. Its names are kept as they were written."""
    name = tree.sources[()].name
    spec = tree.value.get("spec")
    found, last = Found(), Found()
    for path, value in _leaves(spec if isinstance(spec, Mapping) else {}, ("spec",)):
        written = ".".join(map(str, path))
        short = written.removeprefix("spec.")
        place = f"{name}:{line_of(tree, path)}"
        if short in FLAGS:
            found.server.append(Setting(place, FLAGS[short], value, written))
        elif path[1] in ("l2Backend", "l2Backends"):
            _backends(value, place, written, found)
        elif short == "extraArgs" and isinstance(value, list):
            last = from_words([Word("lmcache"), Word("server"), *(Word(str(word), place) for word in value)])
        elif short == "env" and isinstance(value, list):
            own = {e["name"]: str(e.get("value", "")) for e in value if isinstance(e, Mapping) and "name" in e}
            told = from_environment(own, dict.fromkeys(own, place))
            found.add(Found(server=[s.named(s.name.replace("_", "-")) for s in told]))
            others = [entry for entry in value if not str(dict(entry).get("name")).startswith(PREFIX)]
            if others:
                found.beside.append((Setting(place, written, others), OF_THE_POD))
        elif tree.value.get("kind") == COORDINATOR:
            found.beside.append((Setting(place, written, value), WHY_NOT[4][1]))
        else:
            why = next((why for pattern, why in WHY_NOT if re.fullmatch(pattern, short)), OF_THE_POD)
            found.beside.append((Setting(place, written, value), why))
    found.server, lost = over(found.server, last.server)
    found.beside += [(setting, "extraArgs say otherwise") for setting in lost]
    if tree.value.get("kind") == "CacheBlendEngine":
        place = f"{name}:{line_of(tree, ('kind',))}"
        found.server.append(Setting(place, "engine-type", "blend", "kind: CacheBlendEngine"))
    return found


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each setting, with its path: what is told of as one."""
    whole = len(path) >= 2 and (path[1] not in PARTS or path[2:3] in (("resp",), ("raw",), ("serde",)))
    if isinstance(value, Mapping) and value and not whole and "type" not in value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _backends(value: Any, place: str, written: str, found: Found) -> None:
    """One adapter; its encoding stands beside it there and inside it here."""
    if isinstance(value, list):
        for entry in value:
            _backends(entry, place, written, found)
        return
    made = value if isinstance(value, Mapping) else {}
    kind = written.rpartition(".")[2]
    if kind == "serde":
        where = next((s for s in found.server if s.name == "l2-adapter"), None)
        encoding = next(iter(made), "none")
        if where is not None:
            where.value["serde"] = {"type": encoding, **made.get(encoding, {})}
        else:
            found.server.append(Setting(place, "l2-adapter", {"serde": made}, written))
    elif kind == "resp":
        spec = {ADAPTERS.get(str(name), str(name)): inner for name, inner in made.items()}
        found.server.append(Setting(place, "l2-adapter", {"type": "resp", **spec}, written))
    elif "type" in made:
        config = made.get("config")
        spec = dict(config) if isinstance(config, Mapping) else {}
        found.server.append(Setting(place, "l2-adapter", {"type": made["type"], **spec}, written))
    else:
        found.beside.append((Setting(place, written, value), WHY_NOT[0][1]))
