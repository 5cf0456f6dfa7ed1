"""The typed configuration. Imports pydantic: keep it out of start-up."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from kvcore.api.config import Duration, PluginConfig, Size
from kvcore.api.serde import MAX_STAGES
from kvcore.api.units import brief, format_size, parse_size
from kvcore.config.address import Address, parse_address
from kvcore.config.http import Http
from kvcore.config.scripts import PluginsConfig
from kvcore.config.tree import DEFAULT, Path, Row, Source, show
from kvcore.plugins import PluginSpec


def _spec(token: Any, info: ValidationInfo) -> PluginSpec:
    """Plugin specs are validated before the rest; what stands in the data is their index."""
    specs: list[PluginSpec] = (info.context or {}).get("specs", [])
    if isinstance(token, PluginSpec):
        return token
    if type(token) is int and 0 <= token < len(specs):
        return specs[token]
    raise ValueError("must be a plugin name or {plugin: name, option: value}")


MIN_L1_BYTES = 1 << 20
MAX_CHUNK_TOKENS = 1 << 20
OWN_CAPACITY = "the storage keeps to a capacity of its own, see the options of {}: leave this one out"
"""What is wrong with a tier's `capacity`; `{}` is the storage's path."""
CANNOT_LIST = (
    "the storage {!r} cannot list what it holds, and this needs it: leave it out, or implement `list` in the plugin"
)
"""What is wrong with a tier's `capacity`, `ttl` or quotas; `{}` is the storage's plugin."""


def _auto_size(value: Any) -> Any:
    if value == "auto":
        return value
    nbytes = parse_size(value)
    if nbytes < MIN_L1_BYTES:
        raise ValueError(f"{brief(value)} is less than {format_size(MIN_L1_BYTES)}: no object would fit")
    return nbytes


def _auto_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 < value <= MAX_CHUNK_TOKENS):
        return value
    if type(value) is int and value > 0:
        raise ValueError(f"{brief(value)} tokens are more than {MAX_CHUNK_TOKENS}: write fewer, or auto")
    raise ValueError(f"{brief(value)} is no number of tokens: write a whole number above 0, or auto")


def _addresses(value: Any) -> Any:
    found = tuple(parse_address(v) for v in (value if isinstance(value, list | tuple) else (value,)))
    if not found:
        raise ValueError("no address: write one such as unix:///run/kvcore/kvcore.sock")
    return found


Plugin = Annotated[PluginSpec, PlainValidator(_spec), WithJsonSchema({"type": "plugin"})]
AutoSize = Annotated[
    int | Literal["auto"],
    BeforeValidator(_auto_size),
    PlainSerializer(lambda v: v if v == "auto" else format_size(v).replace(" ", ""), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["auto", "8GiB", "500MB"]}),
]
AutoCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_count)]


class L1Config(PluginConfig):
    """Host memory."""

    size: AutoSize = "auto"
    """Bytes of the arena. `auto`: a quarter of the memory available at start."""

    eviction: Plugin
    """The eviction policy. Default: `lru`."""

    lease: Duration = Field(default=60.0, gt=0)
    """A lease that was not ended by then is taken back. It bounds how long a dead worker holds memory."""

    ttl: Duration | None = Field(default=None, gt=0)
    """An object that has been in L1 for so long is a miss, and deleted. Default: it stays while there is room."""


class TierConfig(PluginConfig):
    """One tier behind L1."""

    name: str = Field(default="", pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    """The name in metrics and logs. Default: the storage's name, with a number when it is taken."""

    storage: Plugin
    """Where the bytes are kept: a storage plugin."""

    serde: tuple[Plugin, ...] = Field(default=(), max_length=MAX_STAGES)
    """How the bytes are encoded: serde plugins, applied in this order when storing."""

    write: Literal["all", "reused", "evicted", "none"] = "all"
    """What is written to this tier: all that is computed; only what is asked for again after it was; only what L1
    gives up, and at the end what is still in it; or nothing (a read-only tier)."""

    read: Literal["auto", "always"] = "auto"
    """What is loaded from this tier: `auto`, not what the engine, by what both were measured at, computes sooner; or
    `always` all that it has, which saves the engine work though the request waits longer."""

    promote: bool = True
    """Write objects that were found in a later tier to this one, too. Not with `write: none`."""

    capacity: Size | None = Field(default=None, gt=0)
    """Bytes this tier may hold, for a storage that keeps to no capacity of its own and can list its objects: kvcore
    deletes what the policy names. Default: unlimited."""

    eviction: Plugin
    """With `capacity`, or where tenants have quotas in this tier: the eviction policy. Default: `lru`."""

    ttl: Duration | None = Field(default=None, gt=0)
    """An object that has been in this tier for so long is a miss, and deleted. The storage must be able to list its
    objects. Default: it stays while there is room."""

    timeout: Duration = Field(default=10.0, gt=0)
    """Deadline of one operation on the storage."""

    queue_size: Size = Field(default=1 << 30, gt=0)
    """Bytes that may wait to be stored; more is dropped and counted."""


class ServerConfig(PluginConfig):
    """The server that `kvcore serve` runs and that engines use."""

    url: Annotated[
        tuple[Address, ...],
        PlainValidator(_addresses),
        PlainSerializer(lambda found: [str(a) for a in found], return_type=list, when_used="json"),
        WithJsonSchema({"type": "string", "examples": ["unix:///run/kvcore/kvcore.sock", "tcp://127.0.0.1:7600"]}),
    ]
    """Where it listens. An engine may list several servers: then each has a part of the engine's ranks."""

    autostart: bool = False
    """An engine that finds no server there starts one, with the same configuration; it outlives the engine. Needs a
    `unix://` address."""

    timeout: Duration = Field(default=0.25, gt=0)
    """How long an engine waits for a reply. A server that takes longer counts as gone until it answers again."""

    token: SecretStr | None = Field(default=None, min_length=16, max_length=256)
    """What whoever connects over `tcp://` must know, the same on both sides: at least 16 characters, best from the
    environment (`KVCORE_SERVER__TOKEN`). A Unix socket is protected by its permissions."""

    http: Http = None
    """Serve HTTP, too: an address such as `127.0.0.1:7601`, or a mapping, see [below](#serverhttp). Default: not."""

    @model_validator(mode="after")
    def _fits(self) -> "ServerConfig":
        tcp = [str(a) for a in self.url if not a.path]
        if tcp and self.token is None:
            raise ValueError(f"{tcp[0]} needs a `token`: anybody on this machine can connect to it")
        if self.autostart and (tcp or len(self.url) > 1):
            raise ValueError("`autostart` needs one address, of the form unix:///run/kvcore/kvcore.sock")
        return self


def _masked(salt: str) -> str:
    """As `SecretStr` is: who knows a salt can tell whether a prompt that he guesses was cached."""
    return "**********" if salt else ""


Salt = Annotated[str, PlainSerializer(_masked, return_type=str, when_used="json")]


class InspectConfig(PluginConfig):
    """What a cache remembers for whoever asks why."""

    requests: int = Field(default=1024, ge=0, le=1 << 16)
    """So many of the last lookups are remembered, and what became of the last 262,144 objects, in memory only. 0:
    nothing is, and the cache cannot be asked. Of a request's id, 256 characters."""

    tokens: bool = False
    """Remember the token ids of these requests, too, in the engine's process: then the first token that differs can be
    named. They are the text of the prompts, and take 8 to 40 bytes a token: bound them by `requests`."""


class Config(PluginConfig):
    """The whole configuration, immutable. Made by `load_config`."""

    l1: L1Config
    """Host memory."""

    keys: Plugin
    """How keys are made from a request: a key plugin. Default: `engine`, the engine's own block hashes."""

    chunk_tokens: AutoCount = "auto"
    """Tokens per chunk, a multiple of the engine's block size. `auto`: the smallest whose object reaches
    `min_object_size`, at most 256 tokens."""

    min_object_size: Size = Field(default=1 << 20, gt=0)
    """What `chunk_tokens: auto` aims at. Stores that want large objects raise it."""

    lookup_timeout: Duration = Field(default=2.0, gt=0)
    """A lookup never delays a request longer; what has not arrived by then is a miss."""

    salt: Salt = Field(default="", repr=False)
    """Separates tenants: KV stored under one salt is never found under another."""

    l2: tuple[TierConfig, ...] = ()
    """The tiers behind L1. All are asked at once; the first in this order that has an object serves it. Default without
    a configuration file: one `disk` tier when kvcore-disk is installed, else none."""

    tenants: dict[str, dict[str, Size]] = {}
    """Quotas, so that no tenant lives at another's cost: tenant -> `l1` or a tier's name -> bytes, as in
    `{alice: {l1: 2GiB, disk: 50GiB}, default: {l1: 1GiB}}`. A quota is what a tenant can rely on, not the most that it
    may hold; `default` is the quota of each tenant that is not named: see [server.md](server.md#quotas). Default:
    nobody has a quota."""

    hooks: tuple[Plugin, ...] = ()
    """Observers and wrappers to load: hooks plugins, in order."""

    server: ServerConfig | None = None
    """One cache for all engines of this machine: an address such as `unix:///run/kvcore/kvcore.sock`, a list of them,
    or a mapping, see [below](#server). `kvcore serve` listens there and owns `l1`, `l2` and `hooks`; an engine connects
    to it. Default: the engine's process has a cache of its own."""

    plugins: PluginsConfig = PluginsConfig()
    """Programs that run beside the cache, see [below](#plugins). Only `kvcore serve` runs them. Default: none."""

    inspect: InspectConfig = InspectConfig()
    """What is remembered to explain hits and misses, see [below](#inspect)."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve Prometheus text on this port of 127.0.0.1; 0 picks a free one. Default: not served."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Level of the logger `kvcore`. Default: left to the host application."""

    _sources: dict[Path, Source] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(default=None)

    @property
    def file(self) -> str | None:
        """The file it was read from, or None."""
        return self._file

    @property
    def sources(self) -> Mapping[str, Source]:
        """Where each written value comes from, by path."""
        return {show(path): source for path, source in self._sources.items()}

    def rows(self) -> list[Row]:
        """Every value with its source, defaults included, secrets masked."""
        return list(_rows(self, (), self._sources))


def _rows(value: Any, path: Path, sources: Mapping[Path, Source]) -> Iterator[Row]:
    """The core's own models, field by field, down to plugin options and plain values."""
    if isinstance(value, PluginSpec):
        yield Row(show(path), value.plugin, sources.get((*path, "plugin")) or sources.get(path) or DEFAULT)
        if isinstance(value.options, PluginConfig):
            yield from _rows(value.options, path, sources)
    elif isinstance(value, PluginConfig):
        shown = plain(value)
        for name in type(value).model_fields:
            field = getattr(value, name)
            if isinstance(field, PluginSpec | PluginConfig) or (isinstance(field, tuple) and _holds_models(field)):
                yield from _rows(field, (*path, name), sources)
            else:
                yield from _leaves(shown[name], (*path, name), sources)
    else:
        for i, child in enumerate(value):
            yield from _rows(child, (*path, i), sources)


def _holds_models(values: tuple[Any, ...]) -> bool:
    return any(isinstance(v, PluginSpec | PluginConfig) for v in values)


def _leaves(value: Any, path: Path, sources: Mapping[Path, Source]) -> Iterator[Row]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _leaves(child, (*path, name), sources)
    else:
        yield Row(show(path), value, sources.get(path, DEFAULT))


def plain(model: BaseModel) -> dict[str, Any]:
    """The values as JSON would show them: sizes and durations with units, secrets masked."""
    return model.model_dump(mode="json", warnings=False)
