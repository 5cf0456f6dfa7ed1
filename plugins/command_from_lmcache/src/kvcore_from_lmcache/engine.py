"""LMCache inside the engine (`LMCacheConnectorV1`): its YAML keys and environment variables, as of 0.5.6."""

import re
from collections.abc import Iterable

from kvcore_from_lmcache import programs, stores
from kvcore_from_lmcache.connector import save_decode
from kvcore_from_lmcache.draft import Draft, Setting, as_number, gib, yes
from kvcore_from_lmcache.stores import Options, seconds

ALIASES = {
    "enable_xpyd": "enable_pd",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
    "cufile_buffer_size": "gds_buffer_size",
    "weka_path": "gds_path",
}
"""Names that LMCache has given up for others."""

POLICIES = ("lru", "lfu", "fifo", "mru")
CONNECTOR = "of the vLLM connector: "
TAKEN = frozenset((
    "max_local_cpu_size", "local_cpu", "cache_policy", "pin_timeout_sec", "chunk_size", "lookup_timeout_ms",
    "log_level", "save_decode_cache", "local_disk", "max_local_disk_size", "gds_path", "phx_path",
    "remote_storage_plugins", "remote_url", "remote_serde", "blocking_timeout_secs", "runtime_plugin_locations",
    "extra_config",
))  # fmt: skip
"""Settings that have a place in kvcore."""
DEFAULT_L1_GIB = 5.0
REDIS_URL = "remote_storage_plugin.redis.redis_url"
"""The only name by which LMCache's plugin `redis` finds its server, beside `redis_url` and `remote_url`."""

WITHOUT_STORE = {
    "redis": r"extra_config\.((valkey|resp)_.*|username|password|tls_enable|redis_url|(request|connection)_timeout)",
    "s3": r"extra_config\.(s3_|aws_|disable_tls).*",
    "mooncake": r"extra_config\.(mooncake_.*|transfer_timeout|protocol|local_hostname|metadata_server|device_name"
    r"|global_segment_size|master_server_addr(ess)?|local_buffer_size|storage_root_dir)",
    "nixl": r"extra_config\.(enable_)?nixl_.*",
    "disk": r"extra_config\.(use_odirect|disk_io_threads|fs_base_path|fs_connector_.*|use_direct_io|hfs?3fs_.*)",
}
"""Settings of a store, by the plugin of the tier that would have them."""
WHY_NOT = (
    (r"enable_p2p|p2p_.*|peer_.*_ports|lookup_url|distributed_url|transfer_channel|extra_config\.p2p_.*"
     r"|extra_config\.lookup_backoff_time",
     "kvcore's engines share through a server on their machine (`server:`) or through a tier that all reach"),
    (r"(enable_)?controller.*|lmcache_instance_id|lmcache_worker_.*|extra_config\.(full_sync_.*|kv_msg_.*|heartbeat_url"
     r"|worker_socket_.*|controller_packages|disabled_controllers)",
     "kvcore has no controller: its metrics and HTTP interface are per server (docs/http.md)"),
    (r"enable_(pd|nixl)|pd_.*|nixl_.*",
     "prefill and decode apart need no setting here: give both engines one `server:` or tier"),
    (r"enable_blending|blend_.*|extra_config\.enable_sparse",
     "kvcore reuses prefixes only: it never changes what a model computes"),
    (r"(gds|phx)_buffer_size|use_gds|gds_backend|gds_path_sharding|retrieve_buffer_size|extra_config\.(gds_.*|"
     r"use_exists_sync|force_store_wait)",
     "kvcore's storages work from host memory and take what they need"),
    (r"local_disk_path_sharding", "kvcore's disk tier has one directory"),
    (r"local_cpu_use_hugepages|reserve_local_cpu_size|numa_mode|(enable_)?lazy_.*|extra_config\.(gpu_to_numa.*|shm_name"
     r"|local_cpu\..*|first_rank_max_local_cpu_size)",
     "kvcore allocates its L1 once, at start"),
    (r"extra_config\.(save_only_first_rank|remote_enable_mla_worker_id_as0)",
     "an object holds what all ranks of a machine have"),
    (r"use_layerwise", CONNECTOR + "kvcore.layerwise, by default where it gains something"),
    (r"enable_async_loading|async_loading|use_gpu_connector_v3|pipelined_backend",
     CONNECTOR + "kvcore.load and kvcore.save choose by themselves"),
    (r"save_unfull_chunk", "kvcore keeps whole chunks only"),
    (r"pre_caching_hash_algorithm", "kvcore uses the engine's own block hashes, or SHA-256 (`keys: tokens`)"),
    (r"min_retrieve_tokens", "`read: auto` of a tier loads what is faster loaded than computed, by measurement"),
    (r"priority_limit", "kvcore keeps what any request computes; `write: reused` spares a tier what is asked for once"),
    (r"hit_miss_ratio|lookup_server_worker_ids|enable_scheduler_bypass_lookup|external_lookup_client",
     "a lookup is a few microseconds in kvcore: nothing to bypass"),
    (r"retrieve_locations|store_location", "`write:` and `read:` say it for each tier"),
    (r"(extra_config\.)?internal_api_server.*|script_allowed_imports|run_script_api_enabled",
     "kvcore serve has an HTTP interface (`server.http`), which runs no scripts"),
    (r"enable_kv_events", "the connector publishes vLLM's KV events when vLLM does (`--kv-events-config`)"),
    (r"extra_config\.plugin\..*", "for its programs: `args` and `env` of an entry of `plugins.run` are theirs"),
    (r"storage_plugins|extra_config\.((storage|external)_(plugin|backend)|ext_|audit_).*",
     "another's plugin. " + stores.NO_STORE),
    (r"enable_chunk_statistics|(extra_config\.)?chunk_statistics_.*|extra_config\.(histogram_bucket_.*"
     r"|enable_cache_usage_details_in_response)", "see docs/metrics.md"),
    (r"pin_check_interval_sec", "a lease that has run out is found when its slot is needed"),
    (r"remote_config_url|app_id", "kvcore fetches no configuration from elsewhere"),
    (r".*hidden_state.*", "kvcore keeps KV only"),
    (r"track_usage|usage_.*|request_telemetry_.*", "kvcore reports nothing to anybody"),
    (r"py_enable_gc|disable_banner|use_experimental|mq_timeout|device_backend", "it has no meaning in kvcore"),
    (r"mp_host|mp_port", "the address of LMCache's server: kvcore's is `server: unix:///run/kvcore/kvcore.sock`"),
    (r"(maru|eic)_.*|audit_actual_remote_url|extra_config\.(remote_storage_plugin|eic|maru|azure|bigtable|dax"
     r"|infinistore|rust_raw_block|sagemaker_hyperpod).*", stores.NO_STORE),
    (r"extra_config\.save_chunk_meta|extra_config\.fs_connector_.*", stores.OWN_PACE),
)  # fmt: skip
UNKNOWN = "LMCache 0.5.6 has no such setting, either"
OTHER_EXTRA = "kvcore has nothing that reads it"


def convert(settings: Iterable[Setting], draft: Draft) -> None:
    """Put into the draft what stands in the settings of an engine's LMCache."""
    options = Options(s.named(ALIASES.get(s.name, s.name)) for s in settings)
    _memory(options, draft)
    _behaviour(options, draft)
    _disk(options, draft)
    _gds(options, draft)
    extra = Options(options.rest(), "extra_config.")
    _nixl(options, extra, draft)
    _remote(options, extra, draft)
    if (beside := options.take("runtime_plugin_locations")) is not None:
        programs.convert(beside, draft, served=False)
    if (empty := options.take("extra_config")) is not None:
        draft.leave(empty, "no mapping that can be read") if empty.value else draft.serves(empty, "nothing")
    rest = extra.rest()
    tiers = {tier["storage"]["plugin"] for tier in draft.values.get("l2", [])}
    for setting in options.rest():
        if not setting.name.startswith("extra_config.") or setting in rest:
            draft.leave(setting, _why(setting.name, tiers))


def knows(name: str) -> bool:
    """Whether it is a setting of LMCache's."""
    name = ALIASES.get(name, name)
    return name in TAKEN or name.startswith("extra_config.") or _why(name, set()) != UNKNOWN


def _why(name: str, tiers: set[str]) -> str:
    for plugin, pattern in WITHOUT_STORE.items():
        if re.fullmatch(pattern, name):
            return stores.OWN_PACE if plugin in tiers else f"there is no {plugin} tier"
    for pattern, why in WHY_NOT:
        if re.fullmatch(pattern, name):
            return why
    return OTHER_EXTRA if name.startswith("extra_config.") else UNKNOWN


def _memory(options: Options, draft: Draft) -> None:
    room = options.take("max_local_cpu_size") or Setting("default", "max_local_cpu_size", DEFAULT_L1_GIB)
    value = gib(room.value)
    if value is None:
        draft.change(room, "l1.size", "auto", "not a size above 0 that kvcore takes")
    else:
        draft.keep(room, "l1.size", value, "LMCache takes it for each rank, kvcore for all ranks of an engine together")
    keep = options.take("local_cpu")
    if keep is not None and yes(keep.value):
        draft.serves(keep, "l1")
    elif keep is not None:
        draft.serves(keep, "l1", "kvcore's L1 keeps what fits while it is not needed otherwise", "changed")
    if (policy := options.take("cache_policy")) is not None:
        name = str(policy.value).lower()
        if name in POLICIES:
            draft.keep(policy, "l1.eviction", name)
        else:
            draft.change(policy, "l1.eviction", "lru", f"kvcore has {', '.join(POLICIES)} and s3fifo")
    if (pins := options.take("pin_timeout_sec")) is not None:
        _time(draft, pins, "l1.lease")


def _behaviour(options: Options, draft: Draft) -> None:
    if (chunk := options.take("chunk_size")) is not None:
        tokens = as_number(chunk.value)
        if tokens is not None and tokens >= 1:
            draft.keep(chunk, "chunk_tokens", int(tokens), "`auto` often takes less, and finds more")
        else:
            draft.change(chunk, "chunk_tokens", "auto", "not a number of tokens")
    if (wait := options.take("lookup_timeout_ms")) is not None:
        number = as_number(wait.value)
        if number is not None and number > 0:
            draft.keep(wait, "lookup_timeout", f"{number:g}ms")
        else:
            draft.leave(wait, "not a time above 0")
    if (level := options.take("log_level")) is not None:
        stores.log_level(draft, level)
    if (decode := options.take("save_decode_cache")) is not None:
        save_decode(decode, draft)


def _time(draft: Draft, setting: Setting, path: str) -> None:
    value = seconds(setting.value)
    if value is None:
        draft.leave(setting, "not a time above 0")
    else:
        draft.keep(setting, path, value)


def _disk(options: Options, draft: Draft) -> None:
    where, room = options.take("local_disk"), options.take("max_local_disk_size")
    direct = options.take("extra_config.use_odirect") if where is not None else None
    if where is None or not where.value:
        for setting in (where, room):
            if setting is not None:
                draft.serves(setting, "no disk tier", "" if setting is where else "local_disk is not set")
        return
    paths = [part.strip().removeprefix("file://") for part in str(where.value).split(",")]
    path = stores.disk(draft, where, paths, direct=direct)
    room = room or Setting("default", "max_local_disk_size", 0.0)
    value = gib(room.value)
    if value is None:
        draft.change(
            room, f"{path}.capacity", "auto", "with 0 LMCache keeps nothing there; auto is half of what is free"
        )
    else:
        draft.keep(room, f"{path}.capacity", value, "LMCache takes it for each rank, kvcore for the whole tier")


def _gds(options: Options, draft: Draft) -> None:
    for name, other in (
        ("gds_path", "GPUDirect Storage is the storage nixl, backend: gds"),
        ("phx_path", "kvcore has no Phoenix"),
    ):
        if (where := options.take(name)) is not None and where.value:
            stores.disk(draft, where, [part.strip() for part in str(where.value).split(",")])
            draft.serves(where, "plugin: disk", "through host memory; " + other, "changed")
        elif where is not None:
            draft.serves(where, "no such tier")


def _nixl(options: Options, extra: Options, draft: Draft) -> None:
    if not yes(extra.value("enable_nixl_storage")):
        return
    switch = extra.take("enable_nixl_storage")
    assert switch is not None
    backend = extra.take("nixl_backend") or Setting("default", "extra_config.nixl_backend", "POSIX")
    path = stores.nixl(draft, backend, stores.inside(draft, extra.take("nixl_backend_params")), extra.take("nixl_path"))
    if path is None:
        draft.leave(switch, "see its backend")
        return
    draft.serves(switch, "a tier with the storage nixl")
    if (direct := extra.take("use_direct_io")) is not None:
        draft.default(direct, f"{path}.direct: auto", "O_DIRECT wherever the file system takes it")
    for name in ("nixl_pool_size", "nixl_presence_cache", "nixl_async_put"):
        if (setting := extra.take(name)) is not None:
            draft.leave(setting, stores.OWN_PACE)
    for name in ("nixl_buffer_size", "nixl_buffer_device"):
        if (setting := options.take(name)) is not None:
            draft.leave(setting, "kvcore's L1 is the buffer")


def _remote(options: Options, extra: Options, draft: Draft) -> None:
    plugins, url = options.take("remote_storage_plugins"), options.take("remote_url")
    before = len(draft.values.get("l2", []))
    if plugins is not None and plugins.value:
        names = plugins.value if isinstance(plugins.value, list) else str(plugins.value).split(",")
        for name in map(str.strip, map(str, names)):
            _plugin(plugins, name, url, extra, draft)
    elif plugins is not None:
        draft.serves(plugins, "no remote tier")
    if url is not None and url.value:
        _url(url, extra, draft)
    elif url is not None:
        draft.serves(url, "no remote tier")
    remote = len(draft.values.get("l2", [])) > before
    if (serde := options.take("remote_serde")) is not None:
        if str(serde.value).lower() not in ("naive", "none", ""):
            draft.leave(serde, stores.LOSSY)
        elif remote:
            draft.default(serde, "serde: []", "the bytes as they are, with a checksum")
        else:
            draft.leave(serde, "there is no remote tier")
    if (wait := options.take("blocking_timeout_secs")) is not None:
        if remote:
            _time(draft, wait, f"l2[{len(draft.values['l2']) - 1}].timeout")
        else:
            draft.leave(wait, "nothing remote to wait for")


def _plugin(setting: Setting, name: str, url: Setting | None, extra: Options, draft: Draft) -> None:
    kind, prefix = name.partition(".")[0], f"remote_storage_plugin.{name}."
    if kind == "fs" and (where := extra.take(prefix + "base_path", "fs_base_path")) is not None:
        draft.serves(setting, f"a tier with the storage disk, for {name}")
        paths = [part.strip() for part in str(where.value).split(",")]
        stores.disk(draft, where, paths, direct=extra.take("fs_connector_use_odirect"))
    elif kind == "redis":
        _redis(setting, name, url, extra, draft)
    elif kind == "fs":
        draft.leave(setting, f"{name}: no directory: extra_config has no {prefix}base_path")
    elif kind == "mooncakestore":
        stores.mooncake(draft, setting, extra.without(prefix))
    elif kind == "hf3fs" and (where := extra.take(prefix + "base_path", "hf3fs_base_path")) is not None:
        draft.serves(setting, f"a tier with the storage disk, for {name}", stores.DIRECTORIES["hf3fs"], "changed")
        stores.disk(draft, where, [part.strip() for part in str(where.value).split(",")])
    else:
        draft.leave(setting, f"{name}: {stores.NO_STORE}")


def _redis(setting: Setting, name: str, url: Setting | None, extra: Options, draft: Draft) -> None:
    own = (f"remote_storage_plugin.{name}.redis_url", f"remote_storage_plugin.{name}.url")
    where = extra.take(REDIS_URL, "redis_url")
    other = extra.take(*own) if where is None else None
    if where is not None or other is not None:
        draft.serves(setting, "a tier with the storage redis")
        found = where or other
        assert found is not None
        path = stores.redis(draft, found, str(found.value), extra)
        if other is not None:
            draft.serves(other, f"{path}.url", f"LMCache itself reads only {REDIS_URL}", "changed")
    elif url is not None and url.value:
        draft.serves(setting, "the tier of remote_url", "LMCache finds its address there")
    else:
        draft.leave(setting, f"{name}: no address: extra_config has no {REDIS_URL}, and LMCache tries localhost:6379")


def _url(setting: Setting, extra: Options, draft: Draft) -> None:
    url = str(setting.value)
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss", "unix", "redis-sentinel", "redis-cluster", "resp", "valkey"):
        stores.redis(draft, setting, url, extra, cluster=scheme == "redis-cluster")
    elif scheme == "s3":
        stores.s3(draft, setting, url, extra)
    elif scheme == "mooncakestore":
        stores.mooncake(draft, setting, extra)
    elif scheme == "fs":
        paths = [part.strip() for part in ("/" + url.partition("://")[2].partition("/")[2]).split(",")]
        stores.disk(draft, setting, paths, direct=extra.take("fs_connector_use_odirect"))
    elif scheme == "lm":
        draft.leave(
            setting, "LMCache's own server. On one machine `kvcore serve` is that; over machines use redis or s3"
        )
    elif scheme in ("mock", "blackhole", "audit"):
        draft.leave(setting, "LMCache's stand-in for tests; kvcore's is the storage memory")
    else:
        draft.leave(setting, stores.NO_STORE)
