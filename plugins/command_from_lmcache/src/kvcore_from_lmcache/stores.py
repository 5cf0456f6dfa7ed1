"""LMCache's places for KV behind host memory, as kvcore's tiers."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcore_from_lmcache.draft import Draft, Setting, as_number, gib, is_secret, size, yes

SECRETS_ELSEWHERE = "secrets stay out of the file: set {} in the environment to it"
OWN_PACE = "kvcore has its own way of working with this store"
WORKER_WORDS = ("num_workers", "per_op_workers", "num_threads", "sync_num_workers", "pool_size", "device_ids",
                "buffer_size_mb", "use_direct_io", "use_odirect")  # fmt: skip
NO_STORE = (
    "kvcore has no storage for it. One is a class of 40 lines: kvcore new-plugin storage NAME; "
    "or use redis, s3, mooncake, nixl or disk"
)
LOSSLESS = "`serde: [zstd]` compresses without loss"
LOSSY = f"lossy; {LOSSLESS}, `serde: [quant]` with"
ENCODINGS = {
    "cachegen": LOSSY,
    "fp8": "lossy, with scales of its own; `serde: [zstd]` is not",
    "turboquant": LOSSY,
    "aesgcm": "kvcore-aesgcm encrypts at rest, too, with a key of its own: `openssl rand -hex 32`, in this variable",
}
"""LMCache's serdes."""
KEY = "env:KV_KEY"
"""Where the key is that a tier's objects are encrypted with. kvcore's own variables begin with KVCORE_."""
DIRECTORIES = {
    "fs": "",
    "fs_native": "",
    "phx": "through host memory, not straight to the GPU",
    "hf3fs": "through its mount (FUSE), not 3FS's own rings",
}
"""LMCache's adapters that keep files in a directory, and how kvcore's disk differs."""


class Options:
    """The settings that may concern one store. What nobody has taken is left over."""

    def __init__(self, settings: Iterable[Setting], prefix: str = "") -> None:
        self._left = {s.name.removeprefix(prefix): s for s in settings if s.name.startswith(prefix)}

    def take(self, *names: str) -> Setting | None:
        """The first of these that is set."""
        return next((self._left.pop(name) for name in names if name in self._left), None)

    def value(self, *names: str) -> Any:
        """Its value, or None; it stays."""
        return next((self._left[name].value for name in names if name in self._left), None)

    def without(self, prefix: str) -> "Options":
        """These, where names that begin so may be taken without it, too."""
        for name in [name for name in self._left if name.startswith(prefix)]:
            if (short := name.removeprefix(prefix)) not in self._left:
                self._left[short] = self._left.pop(name)
        return self

    def rest(self) -> list[Setting]:
        """What nobody has taken."""
        return list(self._left.values())


def inside(draft: Draft, setting: Setting | None) -> Options:
    """The settings in one that is a mapping."""
    if setting is None:
        return Options(())
    name = setting.name.removeprefix("extra_config.")
    if not isinstance(setting.value, Mapping) or not setting.value:
        draft.leave(setting, "nothing in it")
        return Options(())
    return Options((Setting(setting.place, f"{name}.{key}", value) for key, value in setting.value.items()), f"{name}.")


def seconds(value: Any) -> str | None:
    """A number of seconds as a duration."""
    number = as_number(value)
    return f"{number:g}s" if number is not None and number > 0 else None


def nbytes(value: Any) -> str | None:
    """A number of bytes as a size; 0 is one."""
    number = as_number(value)
    return size(number) if number is not None and number >= 0 else None


def count(value: Any) -> int | None:
    """A number of requests or connections, within what kvcore takes."""
    number = as_number(value)
    return min(256, int(number)) if number is not None and number >= 1 else None


_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]{1,5})?")

Table = Mapping[str, tuple[str, Callable[[Any], Any]]]

REDIS: Table = {
    "username": ("username", str),
    "valkey_username": ("username", str),
    "valkey_database": ("database", count),
    "database_id": ("database", count),
    "key_prefix": ("prefix", str),
    "request_timeout": ("timeout", seconds),
    "connection_timeout": ("connect_timeout", seconds),
    "ttl_seconds": ("ttl", seconds),
    "valkey_ttl_sec": ("ttl", seconds),
    "num_workers": ("connections", count),
    "resp_num_threads": ("connections", count),
    "valkey_num_workers": ("connections", count),
}
S3: Table = {
    "s3_region": ("region", str),
    "s3_file_prefix": ("prefix", str),
    "s3_addressing_style": ("addressing", str),
    "s3_ca_bundle": ("ca_bundle", str),
    "s3_num_io_threads": ("concurrency", count),
    "s3_max_inflight_reqs": ("concurrency", count),
}
MOONCAKE: Table = {
    "master_server_address": ("master_server_address", str),
    "master_server_addr": ("master_server_address", str),
    "metadata_server": ("metadata_server", str),
    "local_hostname": ("local_hostname", str),
    "protocol": ("protocol", str),
    "device_name": ("device_name", str),
    "rdma_devices": ("device_name", str),
    "global_segment_size": ("global_segment_size", nbytes),
    "transfer_timeout": ("transfer_timeout", seconds),
}
NIXL_PARAMS: Table = {
    "file_path": ("path", str),
    "bucket": ("bucket", str),
    "region": ("region", str),
    "ca_bundle": ("ca_bundle", str),
}
NIXL_BACKENDS = {"POSIX": "posix", "OBJ": "obj", "GDS": "gds", "GDS_MT": "gds_mt"}


def copy(draft: Draft, options: Options, path: str, table: Table) -> None:
    """Every setting of the table that is set, to its option of the storage at `path`."""
    for name, (option, convert) in table.items():
        setting = options.take(name)
        if setting is None:
            continue
        value = convert(setting.value) if setting.value is not None else None
        if value is None:
            draft.leave(setting, f"kvcore's default of {path}.{option} is used")
        elif value != setting.value and isinstance(setting.value, int) and isinstance(value, int):
            draft.change(setting, f"{path}.{option}", value, "the most that kvcore takes")
        else:
            draft.keep(setting, f"{path}.{option}", value)


def disk(draft: Draft, where: Setting, paths: list[str], *, direct: Setting | None = None, why: str = "") -> str:
    """A `disk` tier in the first of the directories; the path of its storage. `why` it is another kind of store."""
    path = draft.tier("disk")
    if len(paths) > 1:
        why = f"one directory only: join the drives (RAID 0, LVM), or {', '.join(paths[1:])} stay unused"
    if why:
        draft.change(where, f"{path}.path", paths[0], why)
    else:
        draft.keep(where, f"{path}.path", paths[0], "what LMCache left there is not read")
    if direct is not None and yes(direct.value):
        draft.default(direct, f"{path}.direct: auto", "O_DIRECT wherever the file system takes it")
    elif direct is not None:
        draft.keep(direct, f"{path}.direct", "off")
    return path


def redis(draft: Draft, where: Setting, url: str, options: Options, *, cluster: bool = False) -> str:
    """A `redis` tier, for Valkey and everything that speaks its protocol; the path of its storage."""
    path = draft.tier("redis")
    scheme, _, rest = url.partition("://")
    rest, *query = re.split("[?#]", rest, maxsplit=1)
    if query:
        draft.leave(where, "what is after `?`: write it as the storage's options, a password by password_env")
    login, _, hosts = rest.rpartition("@")
    hosts, name = _hosts(hosts, scheme, safe="@" not in "".join(query))
    secure = yes(options.value("tls_enable")) or scheme == "rediss"
    if (tls := options.take("tls_enable")) is not None:
        draft.serves(tls, f"{path}.url", "the scheme rediss://" if secure else "the scheme redis://")
    user, _, password = login.partition(":")
    url = f"{'unix' if scheme == 'unix' else 'rediss' if secure else 'redis'}://{hosts}"
    if not hosts:
        url = "redis://HOST:6379"
        draft.change(where, f"{path}.url", url, "not the URL of a server: write yours")
    elif password:
        draft.put(f"{path}.password_env", "REDIS_PASSWORD")
        draft.change(where, f"{path}.url", url, "the password: " + SECRETS_ELSEWHERE.format("REDIS_PASSWORD"))
    else:
        draft.keep(where, f"{path}.url", url)
    if user and hosts:
        draft.put(f"{path}.username", user)
        draft.serves(where, f"{path}.username: {user}")
    mode = options.take("cluster_mode", "valkey_mode")
    if mode is not None and (yes(mode.value) or mode.value == "cluster"):
        draft.keep(mode, f"{path}.cluster", True)
    elif mode is not None:
        draft.default(mode, f"{path}.cluster: false")
    elif cluster:
        draft.put(f"{path}.cluster", True)
    if name and scheme != "redis-sentinel":
        draft.leave(where, "what is behind the servers' `/` is no number of a database")
    if scheme == "redis-sentinel":
        why = "LMCache takes it from REDIS_SERVICE_NAME, by default redismaster: write yours"
        master = Setting("default", "REDIS_SERVICE_NAME", "redismaster")
        draft.change(where if name else master, f"{path}.sentinel_master", name or "redismaster", why)
    if (secret := options.take("password", "valkey_password")) is not None:
        if secret.value:
            draft.change(secret, f"{path}.password_env", "REDIS_PASSWORD", SECRETS_ELSEWHERE.format("REDIS_PASSWORD"))
        else:
            draft.serves(secret, "no password")
    if (ttl := options.take("valkey_enable_ttl")) is not None:
        draft.serves(ttl, f"{path}.ttl", "set by the time itself")
    copy(draft, options, path, REDIS)
    return path


def _hosts(text: str, scheme: str, *, safe: bool) -> tuple[str, str]:
    """The servers in a URL, with the database, as kvcore takes them; and a name behind them, of a Sentinel's master.

    No servers where it is not sure that all of it is one: what is left may be a part of a password.
    """
    if scheme == "unix":
        return (text if safe and re.fullmatch(r"/.*[^/]", text) else ""), ""
    hosts, _, behind = text.replace(" ", "").partition("/")
    if not safe or not all(_SERVER.fullmatch(host) for host in hosts.split(",")):
        return "", ""
    return (f"{hosts}/{behind}", "") if re.fullmatch("[0-9]+", behind) else (hosts, behind)


def s3(draft: Draft, where: Setting, address: str, options: Options) -> str | None:
    """An `s3` tier; the path of its storage. `address` is `s3://bucket`, `s3://bucket.host` or a host alone.

    None for a directory bucket (S3 Express): no tier.
    """
    host = address.removeprefix("s3://").strip("/")
    if re.search("[@?#]", host):
        draft.leave(where, "a login or a query in it: secrets stay out of the file, AWS's SDK reads its variables")
        return None
    if ".s3express-" in host or host.endswith("--x-s3"):
        draft.leave(where, "kvcore-s3 uses no directory buckets (S3 Express): give it a general purpose bucket")
        return None
    path = draft.tier("s3")
    scheme = "http" if yes(options.value("disable_tls")) else "https"
    named = options.take("s3_bucket")
    if named is not None:  # path style: the address is the server alone
        draft.keep(named, f"{path}.bucket", str(named.value))
        draft.change(where, f"{path}.endpoint", f"{scheme}://{host}", "as a URL")
    elif host.endswith("amazonaws.com"):
        draft.change(where, f"{path}.bucket", host.split(".")[0], "AWS's SDK finds the server by bucket and region")
    elif "." in host:
        bucket, _, server = host.partition(".")
        draft.put(f"{path}.endpoint", f"{scheme}://{server}")
        draft.put(f"{path}.addressing", "virtual")
        draft.change(where, f"{path}.bucket", bucket, f"and endpoint: {scheme}://{server}, addressing: virtual")
    else:
        draft.keep(where, f"{path}.bucket", host)
    for name, variable in (
        ("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
        ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ):
        if (secret := options.take(name)) is not None:
            draft.serves(secret, f"the variable {variable}", SECRETS_ELSEWHERE.format(variable), "changed")
    for name in ("disable_tls", "s3_prefer_http2", "s3_enable_s3express", "save_chunk_meta", "s3_max_io_concurrency"):
        if (own := options.take(name)) is not None and name == "disable_tls":
            draft.serves(own, f"{path}.endpoint", "http:// or https://")
        elif own is not None:
            draft.leave(own, OWN_PACE)
    copy(draft, options, path, S3)
    return path


def mooncake(draft: Draft, where: Setting, options: Options) -> str:
    """A `mooncake` tier; the path of its storage."""
    path = draft.tier("mooncake")
    master = str(where.value).partition("://")[2].strip("/")
    if not options.value("master_server_address", "master_server_addr", "mooncake_master_server_addr") and master:
        draft.keep(where, f"{path}.master_server_address", master)
    else:
        draft.serves(where, f"{path}.plugin: mooncake")
    copy(draft, options, path, MOONCAKE)
    copy(draft, options, path, {f"mooncake_{name}": how for name, how in MOONCAKE.items()})
    for name in ("local_buffer_size", "storage_root_dir", "save_chunk_meta", "mooncake_prefer_local_alloc"):
        if (setting := options.take(name)) is not None:
            why = "the master decides it: mooncake_master --root_fs_dir" if name == "storage_root_dir" else OWN_PACE
            draft.leave(setting, why)
    return path


def nixl(draft: Draft, backend: Setting, params: Options, directory: Setting | None) -> str | None:
    """A `nixl` tier; the path of its storage. None when there is no place for it: no tier."""
    known = NIXL_BACKENDS.get(str(backend.value).upper())
    if known == "obj" and not params.value("bucket"):
        draft.leave(backend, "no bucket: LMCache leaves it to AWS_DEFAULT_BUCKET, kvcore's `nixl` needs its name")
    elif known is None and directory is None and not params.value("file_path"):
        draft.leave(backend, NO_STORE)
    else:
        return _nixl(draft, backend, known, params, directory)
    for rest in params.rest():
        draft.leave(rest, "see its backend")
    return None


def _nixl(draft: Draft, backend: Setting, known: str | None, params: Options, directory: Setting | None) -> str:
    path = draft.tier("nixl")
    if known is None:
        draft.change(backend, f"{path}.backend", "posix", f"kvcore has no {backend.value}: files by posix instead")
    elif known.startswith("gds"):
        draft.keep(backend, f"{path}.backend", known, "kvcore's tests have no machine with it: run kvcore doctor first")
    else:
        draft.keep(backend, f"{path}.backend", known)
    if directory is not None and known == "obj":
        draft.leave(directory, "objects have no directory")
    elif directory is not None:
        draft.keep(directory, f"{path}.path", str(directory.value))
    for name, variable in (("access_key", "AWS_ACCESS_KEY_ID"), ("secret_key", "AWS_SECRET_ACCESS_KEY")):
        if (secret := params.take(name)) is not None:
            draft.serves(secret, f"the variable {variable}", SECRETS_ELSEWHERE.format(variable), "changed")
    if (direct := params.take("use_direct_io")) is not None:
        draft.serves(direct, f"{path}.direct: auto", "O_DIRECT wherever the file system takes it", "changed")
    for name, why in (("file_size", "a file is as large as its object"), ("shard_dirs", OWN_PACE)):
        if (own := params.take(name)) is not None:
            draft.leave(own, why)
    if known == "obj":
        _object_address(draft, params, path)
    copy(draft, params, path, NIXL_PARAMS)
    capacity(draft, params, path)
    for setting in params.rest():
        name = setting.name.rpartition(".")[2]
        if is_secret(name):
            draft.leave(setting, "secrets stay out of the file: NIXL reads AWS's variables")
            continue
        draft.keep(setting, f"{path}.params.{name}", str(setting.value), "handed to NIXL as it is")
    return path


def _object_address(draft: Draft, params: Options, path: str) -> None:
    """NIXL takes an endpoint without a scheme."""
    scheme, where = params.take("scheme"), params.take("endpoint_override")
    if where is not None:
        url = str(where.value)
        if "://" not in url:
            url = f"{scheme.value if scheme is not None else 'https'}://{url}"
        (draft.keep if url == where.value else draft.change)(where, f"{path}.endpoint", url, "as a URL")
    if scheme is not None:
        draft.serves(scheme, f"{path}.endpoint")
    if (virtual := params.take("use_virtual_addressing")) is not None:
        draft.keep(virtual, f"{path}.addressing", "virtual" if yes(virtual.value) else "path")


def log_level(draft: Draft, level: Setting) -> None:
    """LMCache's log level."""
    name = str(level.value).lower()
    if name in ("debug", "info", "warning", "error"):
        draft.keep(level, "log_level", name)
    else:
        draft.change(level, "log_level", "error" if name == "critical" else "info", "kvcore has no such level")


def capacity(draft: Draft, options: Options, path: str) -> None:
    """LMCache's client-side capacity and eviction of a store, where kvcore has them."""
    limit = options.take("max_capacity_gb")
    tier, plugin = path.removesuffix(".storage"), draft.values["l2"][-1]["storage"]["plugin"]
    if limit is not None:
        value = gib(limit.value)
        if value is None:
            draft.default(limit, "no limit")
        elif plugin == "mooncake":
            draft.leave(limit, "Mooncake's master keeps to the pool's capacity")
        else:
            draft.keep(limit, f"{path if plugin == 'disk' else tier}.capacity", value)
    policy = options.take("eviction")
    if policy is not None:
        draft.serves(policy, f"{tier}.eviction: lru", "the default; as room is needed, without watermarks", "changed")
