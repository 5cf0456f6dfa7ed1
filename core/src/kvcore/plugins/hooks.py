"""Observers and wrappers: the plugins listed under `hooks:`."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pluggy

from kvcore.api.errors import PluginError
from kvcore.api.hooks import ObjectEvent, Span
from kvcore.api.prefetch import Prefetch

log = logging.getLogger("kvcore")

OBSERVERS = ("opened", "closed", "prefetch", "queued", "asked", "stored", "loaded", "evicted", "failed", "spans")


class Hooks:
    """What the engine calls when something happened. Every method is a cheap no-op without a listener.

    Observers never hurt: one that raises is logged once, with its traceback, and goes on being called.
    """

    def __init__(self, plugins: Sequence[tuple[str, pluggy.PluginManager]] = ()) -> None:
        """`plugins`: label and manager of each hook plugin, in the order of `hooks:`."""
        self._listeners: dict[str, tuple[tuple[str, Callable[..., Any]], ...]] = {
            event: tuple(
                (label, getattr(pm.hook, f"kvcore_{event}"))
                for label, pm in plugins
                if getattr(pm.hook, f"kvcore_{event}").get_hookimpls()
            )
            for event in (*OBSERVERS, "wrap")
        }
        self._complained: set[tuple[str, str]] = set()

    def add(self, label: str, observer: Any) -> None:
        """Have `observer`'s methods of the names in `OBSERVERS` called, too: `stored(events)` and so on."""
        for event in OBSERVERS:
            if (method := getattr(observer, event, None)) is not None:
                self._listeners[event] += ((label, method),)

    def opened(self, name: str) -> None:
        """The cache engine `name` is open."""
        self._tell("opened", name=name)

    def closed(self, name: str) -> None:
        """The cache engine `name` has closed."""
        self._tell("closed", name=name)

    def prefetch(self, prefetch: Prefetch) -> None:
        """`prefetch` loads ahead."""
        self._tell("prefetch", prefetch=prefetch)

    def queued(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """A request waits for its turn."""
        self._tell("queued", namespace=namespace, hashes=hashes)

    def asked(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """A request was looked up."""
        self._tell("asked", namespace=namespace, hashes=hashes)

    def stored(self, events: Sequence[ObjectEvent]) -> None:
        """Objects became loadable."""
        if events:
            self._tell("stored", events=events)

    def loaded(self, events: Sequence[ObjectEvent]) -> None:
        """Objects came from a tier."""
        if events:
            self._tell("loaded", events=events)

    def evicted(self, events: Sequence[ObjectEvent]) -> None:
        """Objects left L1 to make room."""
        if events:
            self._tell("evicted", events=events)

    def failed(self, events: Sequence[ObjectEvent]) -> None:
        """Operations failed."""
        if events:
            self._tell("failed", events=events)

    def spans(self, spans: Sequence[Span]) -> None:
        """What was done for requests."""
        self._tell("spans", spans=spans)

    def listens(self, event: str) -> bool:
        """Whether anyone observes `event` (`stored`, ...), so that a caller can save itself the batch."""
        return bool(self._listeners[event])

    def wrap(self, kind: str, name: str, component: Any) -> Any:
        """`component` decorated by every wrapper in order. A wrapper that raises or returns another kind of thing is a
        `PluginError`: leaving out an encryption in silence would be worse."""
        for label, hook in self._listeners["wrap"]:
            try:
                results = [r for r in hook(kind=kind, name=name, component=component) if r is not None]
            except Exception as e:
                raise PluginError(
                    f"hooks plugin {label} failed to wrap {kind} {name!r}: {type(e).__name__}: {e}"
                ) from e
            for result in results:
                component = _checked(label, kind, name, component, result)
        return component

    def _tell(self, event: str, **arguments: Any) -> None:
        for label, hook in self._listeners[event]:
            try:
                hook(**arguments)
            except Exception:
                if (label, event) not in self._complained:
                    self._complained.add((label, event))
                    log.exception("hooks plugin %s raised in kvcore_%s; later ones are not logged", label, event)


TRAITS = {"storage": ("persistent", "shared"), "serde": ("lossy", "sealing"), "keys": ("scheme",)}


def interface(kind: str) -> tuple[type[Any], ...]:
    """The classes one of which an instance of this kind must be."""
    from kvcore import api

    return {
        "storage": (api.Storage, api.BlockingStorage),
        "serde": (api.Serde,),
        "eviction": (api.EvictionPolicy,),
        "keys": (api.KeyGenerator,),
        "engine": (api.EngineIntegration,),
        "command": (api.Command,),
    }[kind]


def _checked(label: str, kind: str, name: str, before: Any, after: Any) -> Any:
    if not isinstance(after, interface(kind)):
        names = " or ".join(c.__name__ for c in interface(kind))
        raise PluginError(f"hooks plugin {label} wrapped {kind} {name!r} in a {type(after).__name__}: return a {names}")
    for trait in TRAITS.get(kind, ()):
        if getattr(before, trait) != getattr(after, trait):
            raise PluginError(
                f"hooks plugin {label} wrapped {kind} {name!r} and changed its {trait!r} from "
                f"{getattr(before, trait)} to {getattr(after, trait)}: a wrapper keeps the declared traits"
            )
    return after
