"""LMCache's server for the engines of a machine (`lmcache server`): its flags, as of 0.5.6."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore_from_lmcache import programs, stores
from kvcore_from_lmcache.draft import Draft, Setting, as_number, gib
from kvcore_from_lmcache.sources import MANY
from kvcore_from_lmcache.stores import Options, seconds

SOCKET = "unix:///run/kvcore/kvcore.sock"
ALIASES = {"cpu-buffer-size": "l1-size-gb"}
POLICIES = {
    "LRU": ("lru", ""),
    "ARC": ("s3fifo", "kvcore's policy that weighs recency against frequency"),
    "IsolatedLRU": ("lru", "what each tenant can rely on is said in `tenants:`"),
    "noop": ("lru", "L1 is evicted when room is needed"),
}
OTHER_MEDIA = "kvcore's L1 is host memory; put other media behind it as a tier"
WHY_NOT = (
    (r"instance-id|coordinator-.*", "kvcore has no coordinator: each server has its metrics and HTTP interface"),
    (r"p2p-.*", "kvcore's machines share through a tier that all reach"),
    (r"transport|grpc-.*|max-.*workers|null-block-id|enable|server-module|kv-event-log-size|periodic-notifier-.*",
     "kvcore's server moves no KV: engines copy to and from its memory themselves"),
    (r"supported-transfer-mode|isolated-ipc|shm-name", "engines map the server's memory through its socket"),
    (r"hash-algorithm", "kvcore uses the engine's own block hashes, or SHA-256 (`keys: tokens`)"),
    (r"engine-type|enable-segmented-prefix|enable-dedup-content|enable-blend-reorder|blend-.*",
     "kvcore reuses prefixes only: it never changes what a model computes"),
    (r"separate-object-groups", "kvcore keeps each KV cache group apart, always"),
    (r"runtime-plugin-config", "for its programs: `args` and `env` of an entry of `plugins.run` are theirs"),
    (r"script-allowed-imports|run-script-.*", "kvcore's HTTP interface runs no scripts"),
    (r"worker-.*|session-ttl-.*|l1-write-ttl-.*", "a client that is gone loses its leases at once; see `l1.lease`"),
    (r"l1-use-lazy|l1-init-size-gb|l1-align-bytes|l1-use-hugepages", "kvcore allocates its L1 once, at start"),
    (r"l1-devdax-path|gds-l1-.*|l1-manager|l1-(coordinator|shared)-.*", OTHER_MEDIA),
    (r"eviction-.*", "kvcore evicts as room is needed, without watermarks"),
    (r"l2-prefetch-.*", "kvcore asks all tiers at once; `l2[...].read` says what is loaded"),
    (r"track-usage|usage-.*", "kvcore reports nothing to anybody"),
    (r"disable-.*|enable-(tracing|gc-monitor|extra-logging)|otlp-.*|event-bus-.*|metrics-sample-.*|trace-.*|gc-monitor-.*"
     r"|extra-logging-.*|lookup-hash-log-.*", "docs/metrics.md has what is counted; `log_level` sets the log"),
)  # fmt: skip
UNKNOWN = "LMCache 0.5.6 has no such flag, either"
WITH_STORE = "no part of a kvcore tier"
NO_SUCH_STORES = {
    "plugin": "another's plugin. " + stores.NO_STORE,
    "native_plugin": "another's plugin. " + stores.NO_STORE,
    "mock": "LMCache's stand-in for tests; kvcore's is the storage memory",
    "fault_inject": "for tests; kvcore's is the storage faulty",
    "p2p": "kvcore's machines share through a tier that all reach",
}


def convert(settings: Iterable[Setting], draft: Draft) -> None:
    """Put into the draft what the flags of LMCache's server say."""
    all_flags = [s.named(ALIASES.get(s.name, s.name)) for s in settings]
    options = Options(s for s in all_flags if s.name not in MANY)
    for number, setting in enumerate(s for s in all_flags if s.name == "l1-manager"):
        _manager(setting, number, draft)
    _memory(options, draft)
    _address(options, draft)
    if (level := options.take("log-level")) is not None:
        stores.log_level(draft, level)
    if (beside := options.take("runtime-plugin-locations")) is not None:
        programs.convert(beside, draft, served=True)
    if options.value("engine-type") == "default" and (kind := options.take("engine-type")) is not None:
        draft.serves(kind, "kvcore's only one")
    store_policy = options.take("l2-store-policy")
    for number, setting in enumerate(s for s in all_flags if s.name == "l2-adapter"):
        _adapter(setting, number, draft)
    if store_policy is not None and store_policy.value == "default":
        draft.default(store_policy, "write: all")
    elif store_policy is not None:
        draft.leave(store_policy, "kvcore's L1 keeps what fits while it is not needed otherwise")
    for setting in options.rest():
        draft.leave(setting, next((why for pattern, why in WHY_NOT if re.fullmatch(pattern, setting.name)), UNKNOWN))


def _memory(options: Options, draft: Draft) -> None:
    slab, dax = options.take("gds-l1-path"), options.value("l1-devdax-path")
    room = options.take("l1-size-gb")
    if slab is not None:
        _slab(draft, slab, options.value("gds-l1-backend"), room or Setting("default", "l1-size-gb", None))
    elif room is not None:
        value = gib(room.value)
        if dax:
            draft.change(room, "l1.size", "auto", f"it was the size of {dax}. " + OTHER_MEDIA)
        elif value is None:
            draft.change(room, "l1.size", "auto", "not a size above 0 that kvcore takes")
        else:
            draft.keep(room, "l1.size", value)
    if (policy := options.take("eviction-policy")) is not None and "eviction" not in draft.values.get("l1", {}):
        _policy(draft, policy)
    elif policy is not None:
        draft.leave(policy, "the manager in memory says otherwise")
    _lease(draft, options.take("l1-read-ttl-seconds"))
    chunk = options.take("chunk-size")
    tokens = as_number(chunk.value) if chunk is not None else None
    if chunk is not None and tokens is not None and tokens >= 1:
        draft.keep(chunk, "chunk_tokens", int(tokens), "`auto` often takes less, and finds more")
    elif chunk is not None:
        draft.change(chunk, "chunk_tokens", "auto", "not a number of tokens")


def _policy(draft: Draft, policy: Setting) -> None:
    name, why = POLICIES.get(str(policy.value), ("lru", "kvcore has lru, lfu, fifo, mru and s3fifo"))
    (draft.change if why else draft.keep)(policy, "l1.eviction", name, why)


def _lease(draft: Draft, lease: Setting | None) -> None:
    value = seconds(lease.value) if lease is not None else None
    if value is not None and lease is not None:
        draft.keep(lease, "l1.lease", value)
    elif lease is not None:
        draft.leave(lease, "not a time above 0")


def _slab(draft: Draft, where: Setting, backend: Any, room: Setting) -> None:
    """A file on NVMe for L1: a tier behind host memory that takes what that gives up."""
    if str(backend).lower() == "ugds":
        draft.leave(where, "a raw device; kvcore keeps files")
        draft.leave(room, "the size of the raw device's part")
        return
    path = stores.disk(draft, where, [str(where.value)], why="through host memory, which `l1.size` bounds")
    draft.put(f"{path.removesuffix('.storage')}.write", "evicted")
    draft.keep(room, f"{path}.capacity", gib(room.value) or "auto", "of the file, not of memory")


def _manager(setting: Setting, number: int, draft: Draft) -> None:
    """One of several L1s, in the order in which they are filled. Memory is kvcore's L1, NVMe a tier behind it."""
    inner = _inner(setting, number)
    kind = str(inner.value("type")).upper()
    room = inner.take("size_gb") or Setting("default", "size_gb", None)
    for name in ("type", "tag"):
        if (said := inner.take(name)) is not None and kind in ("DRAM", "GDS"):
            draft.serves(said, "l1" if kind == "DRAM" else "a tier behind l1")
        elif said is not None:
            draft.leave(said, OTHER_MEDIA)
    if kind == "DRAM":
        draft.keep(room, "l1.size", gib(room.value) or "auto")
        _lease(draft, inner.take("read_ttl_seconds"))
        if isinstance(policy := inner.take("eviction"), Setting):
            named = policy.value.get("eviction_policy") if isinstance(policy.value, Mapping) else policy.value
            _policy(draft, replace(policy, value=named))
    elif kind == "GDS" and (where := inner.take("path")) is not None:
        _slab(draft, where, inner.value("backend"), room)
    else:
        draft.leave(room, OTHER_MEDIA)
    for rest in inner.rest():
        draft.leave(rest, "kvcore allocates its L1 once, at start" if kind == "DRAM" else OTHER_MEDIA)


def _inner(setting: Setting, number: int) -> Options:
    """The settings in a flag's JSON."""
    spec = setting.value if isinstance(setting.value, Mapping) else {}
    place = f"{setting.place}[{number}]" if setting.place.startswith("--") else setting.place
    return Options(Setting(place, str(name), value) for name, value in spec.items())


def _address(options: Options, draft: Draft) -> None:
    host, port = options.take("host"), options.take("port")
    draft.put("server.url", SOCKET)
    for setting in (host, port):
        if setting is not None:
            draft.change(setting, "server.url", SOCKET, "engines share their machine's server by a Unix socket")
    if host is None and port is None:
        draft.change(Setting("default", "port", 5555), "server.url", SOCKET, "kvcore serve listens there")
    http_host, http_port = options.take("http-host"), options.take("http-port")
    if http_host is not None or http_port is not None:
        listen = f"127.0.0.1:{http_port.value if http_port is not None else 8080}"
        draft.put("server.http", listen)
        if http_port is not None:
            draft.keep(http_port, "server.http", listen)
        if http_host is not None and http_host.value in ("127.0.0.1", "localhost"):
            draft.keep(http_host, "server.http", listen)
        elif http_host is not None:
            draft.change(http_host, "server.http", listen, "beyond this machine only with a token: docs/http.md")
    if (metrics := options.take("prometheus-port")) is not None:
        draft.keep(metrics, "metrics_port", metrics.value, "on 127.0.0.1")


def _adapter(setting: Setting, number: int, draft: Draft) -> None:
    spec: Mapping[str, Any] = setting.value if isinstance(setting.value, Mapping) else {}
    inner = _inner(setting, number)
    kind = inner.take("type")
    if kind is None:
        draft.leave(setting, "no JSON object with a `type`")
        return
    path = _store(kind, spec, inner, draft)
    if path is None:
        for rest in inner.rest():
            draft.leave(rest, f"of the adapter {kind.value}")
        return
    stores.capacity(draft, inner, path)
    if (serde := inner.take("serde")) is not None:
        _serde(draft, serde, path)
    for rest in inner.rest():
        draft.leave(rest, _why(rest))


def _serde(draft: Draft, serde: Setting, path: str) -> None:
    kind = str(serde.value.get("type") if isinstance(serde.value, Mapping) else serde.value)
    why = stores.ENCODINGS.get(kind, "another's encoding; " + stores.LOSSLESS)
    where = f"{path.removesuffix('.storage')}.serde"
    if kind == "aesgcm":
        draft.put(where, [{"plugin": "aesgcm", "keys": {"k1": stores.KEY}}])
        draft.serves(serde, f"{where}: aesgcm, keys: {{k1: {stores.KEY}}}", why, "changed")
    elif kind == "fp8":
        draft.put(where, [{"plugin": "quant", "format": "fp8"}])
        draft.serves(serde, f"{where}: quant, format: fp8", why, "changed")
    else:
        draft.leave(serde, why)


def _why(rest: Setting) -> str:
    """Why an option of an adapter has no place in a tier."""
    if rest.name == "affinity_tag":
        return "kvcore has one L1"
    if rest.name == "persist_enabled":
        return "what is in a tier stays there when kvcore ends"
    pace = rest.name in stores.WORKER_WORDS or rest.name.startswith(("read_", "relative_tmp", "s3_", "rdma_", "hf3fs_"))
    return stores.OWN_PACE if pace else WITH_STORE


def _store(kind: Setting, spec: Mapping[str, Any], inner: Options, draft: Draft) -> str | None:
    """The tier for an adapter; the path of its storage, or None when there is none."""
    name = str(kind.value)
    if name in stores.DIRECTORIES and (where := inner.take("base_path", "base_paths")) is not None:
        why = stores.DIRECTORIES[name]
        draft.serves(kind, "plugin: disk", why, "changed" if why else "kept")
        paths = [part.strip() for part in str(where.value).split(",")]
        path = stores.disk(draft, where, paths, direct=inner.take("use_odirect", "use_direct_io"))
        if (limit := inner.take("max_capacity_bytes")) is not None:
            value = stores.nbytes(limit.value)
            bounded = value not in (None, "0B")
            draft.keep(
                limit, f"{path}.capacity", value if bounded else "auto", "" if bounded else "half of what is free"
            )
        elif "max_capacity_gb" not in spec:
            default = Setting("default", "max_capacity_gb", 0)
            draft.change(default, f"{path}.capacity", "auto", "LMCache fills the disk; auto is half of what is free")
        return path
    if name in ("resp", "valkey", "valkey_rdma"):
        path = stores.redis(draft, kind, _redis_url(spec, inner, draft), inner)
        if name == "valkey_rdma":
            draft.serves(kind, f"{path}.url", "over TCP: kvcore has no RDMA to Valkey", "changed")
        return path
    if name == "s3" and (where := inner.take("s3_endpoint")) is not None:
        draft.serves(kind, "plugin: s3")
        return stores.s3(draft, where, str(where.value), inner)
    if name == "mooncake_store":
        return stores.mooncake(draft, kind, inner)
    if name.startswith("nixl") and (backend := inner.take("backend")) is not None:
        nixl = stores.nixl(draft, backend, stores.inside(draft, inner.take("backend_params")), None)
        if nixl is not None:
            draft.serves(kind, "plugin: nixl")
        else:
            draft.leave(kind, "see its backend")
        return nixl
    if name == "plugin" and str(spec.get("module_path", "")).startswith("kvcore_lmcache"):
        draft.leave(
            kind, f"it is kvcore already: use its file, {spec.get('adapter_params', {}).get('config', 'see there')}"
        )
    else:
        draft.leave(kind, NO_SUCH_STORES.get(name, stores.NO_STORE))
    return None


def _redis_url(spec: Mapping[str, Any], inner: Options, draft: Draft) -> str:
    for name in ("host", "port", "startup_nodes"):
        if (setting := inner.take(name)) is not None:
            draft.serves(setting, f"l2[{len(draft.values.get('l2', []))}].storage.url")
    nodes = spec.get("startup_nodes") or f"{spec.get('host', '127.0.0.1')}:{spec.get('port', 6379)}"
    return f"redis://{nodes}"
