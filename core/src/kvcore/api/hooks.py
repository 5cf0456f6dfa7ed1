"""Hook specifications (pluggy): how a plugin offers its component, and how an observer listens.

A plugin module is found through an entry point of the group of its kind (`kvcore.storage`, `kvcore.serde`,
`kvcore.eviction`, `kvcore.keys`, `kvcore.engine`); the entry point's name is the name in YAML. In the group
`kvcore.command` it is the command's. Observers and wrappers come through the group `kvcore.hooks` and are listed under
`hooks:`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pluggy

from kvcore.api.prefetch import Prefetch

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")

Kind = Literal["storage", "serde", "eviction", "keys", "engine", "command"]
KINDS: tuple[Kind, ...] = ("storage", "serde", "eviction", "keys", "engine", "command")
GROUPS: dict[str, str] = {**{kind: f"kvcore.{kind}" for kind in KINDS}, "hooks": "kvcore.hooks"}


class ApiVersion(NamedTuple):
    """Version of one kind's interface, written as a literal by the plugin's author: what it was built against."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


API_VERSIONS: dict[str, ApiVersion] = {kind: ApiVersion(1, 0) for kind in GROUPS}
"""What this core offers. A component is accepted with the same major and no greater minor."""


@dataclass(frozen=True, slots=True)
class Component:
    """What a component hook returns.

    Args:
        api: the interface version the component was written against, such as `ApiVersion(1, 0)`.
        factory: called as `factory(config, context)`; usually the class.
        config: a `PluginConfig` model of the component's options, or None when it has none.
    """

    api: ApiVersion
    factory: Callable[[Any, Any], Any]
    config: type[Any] | None = None


class ObjectEvent(NamedTuple):
    """One object in an observer's batch. `tier` is `l1` or the name of an L2 tier; `reason` says why.

    What an engine computed comes with `parent`, the chunk hash before it in its request (`b""`: it is the first), and
    with the `tokens` of its chunk. Elsewhere they are not known: None and 0.
    """

    key: Any
    tier: str
    nbytes: int
    reason: str = ""
    parent: bytes | None = None
    tokens: int = 0


Attribute = str | bool | int | float


class Span(NamedTuple):
    """Something that the cache did for a request, from `begin_ns` to `end_ns` (as of `time.time_ns`).

    `id` is unique in this process. `parent` is the span that it is a part of, 0 for none; `root` the first of all,
    which may be told after its parts. `request` is the engine's name for the request, `trace` the headers of its W3C
    trace context (`traceparent`, `tracestate`). `error` says why it failed, `""` that it did not.
    """

    name: str
    id: int
    parent: int
    root: int
    request: str
    trace: Mapping[str, str] | None
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    error: str = ""


@hookspec(firstresult=True)
def kvcore_storage() -> Component:  # type: ignore[empty-body]
    """The storage this plugin offers: `factory` makes a `Storage` or a `BlockingStorage`."""


@hookspec(firstresult=True)
def kvcore_serde() -> Component:  # type: ignore[empty-body]
    """The serde this plugin offers: `factory` makes a `Serde`."""


@hookspec(firstresult=True)
def kvcore_eviction() -> Component:  # type: ignore[empty-body]
    """The eviction policy this plugin offers: `factory` makes an `EvictionPolicy`."""


@hookspec(firstresult=True)
def kvcore_keys() -> Component:  # type: ignore[empty-body]
    """The key generator this plugin offers: `factory` makes a `KeyGenerator`."""


@hookspec(firstresult=True)
def kvcore_engine() -> Component:  # type: ignore[empty-body]
    """The engine connector this plugin offers: `factory` makes an `EngineIntegration`."""


@hookspec(firstresult=True)
def kvcore_command() -> Component:  # type: ignore[empty-body]
    """The command this plugin offers to the command line: `factory` makes a `Command`."""


@hookspec(firstresult=True)
def kvcore_observer() -> Component:  # type: ignore[empty-body]
    """The observer with options that a plugin of the group `kvcore.hooks` offers: `factory` makes an object whose
    methods of the names below, marked `@hookimpl`, are called. It is made wherever the configuration is read; its work
    begins with `kvcore_opened` and ends with `kvcore_closed`."""


@hookspec
def kvcore_opened(name: str) -> None:
    """A cache engine named `name` is open and serves."""


@hookspec
def kvcore_closed(name: str) -> None:
    """The cache engine named `name` has closed."""


@hookspec
def kvcore_prefetch(prefetch: Prefetch) -> None:
    """A cache engine with L1 is open, after `kvcore_opened`: with `prefetch` it can be asked to load ahead."""


@hookspec
def kvcore_queued(namespace: bytes, hashes: Sequence[bytes]) -> None:
    """An engine has got a request whose prompt has these chunks, and will look them up when it is its turn. Only from
    engines that say so. Called in the engine's step, or on the server's thread: take it down and return."""


@hookspec
def kvcore_asked(namespace: bytes, hashes: Sequence[bytes]) -> None:
    """A request was looked up. Over a server, without the chunks at the front that the engine holds itself. Called as
    `kvcore_queued` is."""


@hookspec
def kvcore_stored(events: Sequence[ObjectEvent]) -> None:
    """Objects became loadable, in L1 or in a tier. `reason` is `loaded` for what came into L1 from a tier."""


@hookspec
def kvcore_loaded(events: Sequence[ObjectEvent]) -> None:
    """Objects came from a tier into L1 or into a caller's buffers."""


@hookspec
def kvcore_evicted(events: Sequence[ObjectEvent]) -> None:
    """Objects left L1 or a tier, as far as this process can tell: in the order of `kvcore_stored`, and at most about a
    second later. `reason`: `room`, `cleared`, `expired`, or `unused` for what was fetched or given up and is not needed
    there."""


@hookspec
def kvcore_failed(events: Sequence[ObjectEvent]) -> None:
    """Operations failed; `reason` says how."""


@hookspec
def kvcore_spans(spans: Sequence[Span]) -> None:
    """What was done for requests, about a second after the fact, in the order in which it ended. Told by the process
    that owns the cache, and kept only where this hook is implemented when the cache opens. kvcore-otel's README lists
    their names and attributes. A prompt shorter than a chunk is no lookup here; why a chunk was not there is worked out
    only by `kvcore explain`."""


@hookspec
def kvcore_wrap(kind: str, name: str, component: Any) -> Any:
    """Return a decorated `component` (metrics, encryption, fault injection), or None to leave it.

    Wrappers apply in the order of `hooks:`; each must keep the interface and the class's declared traits.
    """
