"""LMCache's server for the engines of a machine (`lmcache server`): its flags, as of 0.5.6."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.cli.from_lmcache import stores
from kvcore.cli.from_lmcache.draft import Draft, Setting, as_number, gib
from kvcore.cli.from_lmcache.stores import Options, seconds

SOCKET = "unix:///run/kvcore/kvcore.sock"
ALIASES = {"cpu-buffer-size": "l1-size-gb"}
POLICIES = {
    "LRU": ("lru", ""),
    "ARC": ("s3fifo", "kvcore's policy that weighs recency against frequency"),
    "IsolatedLRU": ("lru", "what each tenant can rely on is said in `tenants:`"),
    "noop": ("lru", "L1 is evicted when room is needed"),
}
NO_STORE = (
    "kvcore has no storage for it. One is a class of 40 lines: kvcore new-plugin storage NAME; "
    "or use redis, s3, mooncake, nixl or disk"
)
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
    (r"runtime-plugin-.*", "`plugins.run` starts programs with kvcore's server: docs/configuration.md"),
    (r"script-allowed-imports|run-script-.*", "kvcore's HTTP interface runs no scripts"),
    (r"worker-.*|session-ttl-.*|l1-write-ttl-.*", "a client that is gone loses its leases at once; see `l1.lease`"),
    (r"l1-use-lazy|l1-init-size-gb|l1-align-bytes|l1-use-hugepages", "kvcore allocates its L1 once, at start"),
    (r"l1-devdax-path|gds-l1-.*|l1-manager", "kvcore's L1 is host memory; put other media behind it as a tier"),
    (r"eviction-.*", "kvcore evicts as room is needed, without watermarks"),
    (r"l2-prefetch-.*", "kvcore asks all tiers at once; `l2[...].read` says what is loaded"),
    (r"disable-.*|enable-(tracing|gc-monitor|extra-logging)|otlp-.*|event-bus-.*|metrics-sample-.*|trace-.*|gc-monitor-.*"
     r"|extra-logging-.*|lookup-hash-log-.*", "docs/metrics.md has what is counted; `log_level` sets the log"),
)  # fmt: skip
UNKNOWN = "LMCache 0.5.6 has no such flag, either"
WITH_STORE = "no part of a kvcore tier"
NO_SUCH_STORES = {
    "plugin": "another's plugin. " + NO_STORE,
    "mock": "LMCache's stand-in for tests; kvcore's is the storage memory",
    "fault_inject": "for tests; kvcore's is the storage faulty",
    "p2p": "kvcore's machines share through a tier that all reach",
}


def convert(settings: Iterable[Setting], draft: Draft) -> None:
    """Put into the draft what the flags of LMCache's server say."""
    all_flags = [Setting(s.place, ALIASES.get(s.name, s.name), s.value) for s in settings]
    options = Options(s for s in all_flags if s.name != "l2-adapter")
    _memory(options, draft)
    _address(options, draft)
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
    if (room := options.take("l1-size-gb")) is not None:
        value = gib(room.value)
        if value is None:
            draft.change(room, "l1.size", "auto", "not a size above 0")
        else:
            draft.keep(room, "l1.size", value)
    if (policy := options.take("eviction-policy")) is not None:
        name, why = POLICIES.get(str(policy.value), ("lru", "kvcore has lru, lfu, fifo, mru and s3fifo"))
        (draft.change if why else draft.keep)(policy, "l1.eviction", name, why)
    if (lease := options.take("l1-read-ttl-seconds")) is not None:
        value = seconds(lease.value)
        if value is None:
            draft.leave(lease, "not a time above 0")
        else:
            draft.keep(lease, "l1.lease", value)
    chunk = options.take("chunk-size")
    tokens = as_number(chunk.value) if chunk is not None else None
    if chunk is not None and tokens is not None and tokens >= 1:
        draft.keep(chunk, "chunk_tokens", int(tokens), "`auto` often takes less, and finds more")
    elif chunk is not None:
        draft.change(chunk, "chunk_tokens", "auto", "not a number of tokens")


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
    place = f"{setting.place}[{number}]"
    inner = Options(Setting(place, str(name), value) for name, value in spec.items())
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
    for rest in inner.rest():
        pace = rest.name in stores.WORKER_WORDS or rest.name.startswith(("read_", "relative_tmp", "s3_"))
        lossy = "kvcore-zstd compresses without loss: `serde: [zstd]`" if rest.name == "serde" else WITH_STORE
        draft.leave(rest, stores.OWN_PACE if pace else lossy)


def _store(kind: Setting, spec: Mapping[str, Any], inner: Options, draft: Draft) -> str | None:
    """The tier for an adapter; the path of its storage, or None when there is none."""
    name = str(kind.value)
    if name in ("fs", "fs_native") and (where := inner.take("base_path")) is not None:
        draft.serves(kind, "plugin: disk")
        path = stores.disk(draft, where, [str(where.value)], direct=inner.take("use_odirect"))
        if "max_capacity_gb" not in spec:
            default = Setting("default", "max_capacity_gb", 0)
            draft.change(default, f"{path}.capacity", "auto", "LMCache fills the disk; auto is half of what is free")
        return path
    if name in ("resp", "valkey"):
        return stores.redis(draft, kind, _redis_url(spec, inner, draft), inner)
    if name == "s3" and (where := inner.take("s3_endpoint")) is not None:
        draft.serves(kind, "plugin: s3")
        return stores.s3(draft, where, str(where.value), inner)
    if name == "mooncake_store":
        return stores.mooncake(draft, kind, inner)
    if name.startswith("nixl") and (backend := inner.take("backend")) is not None:
        draft.serves(kind, "plugin: nixl")
        params = inner.take("backend_params")
        given = params.value if params is not None and isinstance(params.value, Mapping) else {}
        inside = [Setting(kind.place, f"backend_params.{option}", value) for option, value in given.items()]
        return stores.nixl(draft, backend, Options(inside, "backend_params."), None)
    if name == "plugin" and str(spec.get("module_path", "")).startswith("kvcore_lmcache"):
        draft.leave(
            kind, f"it is kvcore already: use its file, {spec.get('adapter_params', {}).get('config', 'see there')}"
        )
    else:
        draft.leave(kind, NO_SUCH_STORES.get(name, NO_STORE))
    return None


def _redis_url(spec: Mapping[str, Any], inner: Options, draft: Draft) -> str:
    for name in ("host", "port", "startup_nodes"):
        if (setting := inner.take(name)) is not None:
            draft.serves(setting, f"l2[{len(draft.values.get('l2', []))}].storage.url")
    nodes = spec.get("startup_nodes") or f"{spec.get('host', '127.0.0.1')}:{spec.get('port', 6379)}"
    return f"redis://{nodes}"
