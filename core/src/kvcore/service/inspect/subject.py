"""One open cache, as it is shown: whichever face it has, in this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from kvcore.engine import Engine, ModelSpec, ObjectStore
from kvcore.engine.fingerprint import weights_folder
from kvcore.engine.identity import Identities
from kvcore.observe import Decisions
from kvcore.observe.decisions import tenant_shown

if TYPE_CHECKING:
    from kvcore.config import Config
    from kvcore.control import StorageManager
    from kvcore.observe import Metrics
    from kvcore.service.client import RemoteEngine

Kind = Literal["server", "engine", "store", "client"]


def _none() -> Sequence[Mapping[str, Any]]:
    return ()


@dataclass(eq=False)
class Subject:
    """A cache and what belongs to it.

    Args:
        cache: the engine or object store.
        name: its name, for people.
        manager: its storage manager, where the cache is in this process.
        clients: its connections, where it is in servers.
        address: where engines connect, of a server.
        sessions: the clients of now, each with the fields of `SessionModel`; from any thread, returns at once.
        helpers: the programs beside the cache, each with the fields of `HelperModel`; like `sessions`.
    """

    cache: Engine | ObjectStore
    name: str
    manager: "StorageManager | None" = None
    clients: "Sequence[RemoteEngine]" = ()
    address: str = ""
    sessions: Callable[[], Sequence[Mapping[str, Any]]] = _none
    helpers: Callable[[], Sequence[Mapping[str, Any]]] = _none
    began: float = field(default_factory=time.monotonic)
    kept: dict[str, Any] = field(default_factory=dict)
    """What views keep between two questions."""
    read_at: float = float("-inf")
    """When somebody who records it has last read all requests, by the monotonic clock."""

    @property
    def kind(self) -> Kind:
        """What `StatusModel.kind` says."""
        if self.manager is None:
            return "client"
        if self.manager.arena is None:
            return "store"
        return "server" if self.address else "engine"

    @property
    def config(self) -> "Config":
        """Its configuration."""
        return self.clients[0].config if self.manager is None else self.manager.config

    @property
    def shown(self) -> bool:
        """Whether anything of it is to be shown."""
        return self.config.inspect.requests > 0

    @property
    def closing(self) -> bool:
        """Whether it is being closed, which may take a while: what waits is written out."""
        return self.manager is not None and self.manager.closed

    @property
    def metrics(self) -> "Metrics":
        """Its counters. Of several servers, what the first was asked: they are asked alike."""
        return self.clients[0].metrics if self.manager is None else self.manager.metrics

    @property
    def decisions(self) -> Decisions:
        """The record of its requests."""
        found: Decisions = cast(Any, self.cache).decisions  # each of the classes has it
        return found

    def _registered(self) -> dict[bytes, tuple[ModelSpec, str]]:
        """Namespace -> model and tenant, of all that were registered; of a client, those that its engine uses."""
        if self.manager is None:
            return {s.namespace: (s.spec, s.tenant) for c in self.clients for s in c.spaces() if s.namespace}
        known: Identities | None = getattr(self.cache, "identities", None)
        return {n: (i.spec, i.tenant) for n, i in known.all().items()} if known is not None else {}

    @property
    def spaces(self) -> dict[bytes, tuple[str, str]]:
        """Namespace -> the model's name, and the tenant as it is shown."""
        return {n: (spec.model, self.tenant(tenant)) for n, (spec, tenant) in self._registered().items()}

    def tenant(self, name: str) -> str:
        """A tenant as it is shown, see `tenant_shown`."""
        return tenant_shown(name, self.config.tenants if self.manager is None else self.manager.named_tenants)

    @property
    def specs(self) -> dict[bytes, ModelSpec]:
        """Namespace -> the model as its engine describes it."""
        return {n: spec for n, (spec, _) in self._registered().items()}

    @property
    def models(self) -> dict[str, str]:
        """Model -> the folder of its weights; empty where this process has not read them."""
        specs = self.specs.values()
        return {spec.model: weights_folder(spec.weights) for spec in specs if not spec.extra.get("lora")}

    @property
    def token_bytes(self) -> dict[bytes, int]:
        """Namespace -> KV of a token in bytes, in all groups and ranks."""
        specs = self.specs
        block = {n: sum(sum(g.block_bytes) for g in spec.groups) * spec.ranks for n, spec in specs.items()}
        return {n: -(-block[n] // spec.block_tokens) for n, spec in specs.items()}

    def at_end(self, call: Callable[[], None]) -> None:
        """Have `call` called when the cache is closed."""
        if self.manager is not None:
            self.manager.hooks.add("inspect", _Ending(call))
        for client in self.clients[:1]:
            client.leaving = call


class _Ending:
    """An observer of the end alone."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def closed(self, name: str) -> None:
        """See `kvcore_closed`."""
        self._call()
