"""What travels between the scheduler's half and the workers' half, once a step. Plain picklable values."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcore.api import ObjectLayout
from kvcore.transfer.plan import Copy


class Attach(NamedTuple):
    """How a worker reaches the arena named `token`, and what the objects in it look like."""

    token: str
    descriptor: dict[str, Any]
    layouts: tuple[ObjectLayout, ...]
    layers: tuple[tuple[str, ...], ...]


class Load(NamedTuple):
    """Fill these blocks of a request. `missing` are promised blocks that no copy fills: they count as failed.

    `beside` the steps, or inside this one. One beside them may come in parts, over several steps: the part that begins
    it is its `first`, and that which ends it its `last`.
    """

    id: int
    req_id: str
    arena: str
    copies: tuple[Copy, ...]
    blocks: frozenset[int]
    missing: frozenset[int] = frozenset()
    beside: bool = False
    first: bool = True
    last: bool = True


class Save(NamedTuple):
    """Copy these blocks of a request into the arena."""

    id: int
    req_id: str
    arena: str
    copies: tuple[Copy, ...]


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders. `arena` is the token of the arena of now, "" while there is none; `attach` is how to reach it,
    once. `held` are finished requests whose blocks stay until their saves are done; `flush` are saves to end before
    this step touches any block; `void` are loads under way whose KV may not be used any more; `idle` says that the step
    computes nothing; `want_layout` asks for the workers' layouts, where vLLM did not bring them at start (under its
    MultiConnector). The first three are of `kvcore_vllm.modes.Modes`."""

    save_async: bool = False
    load_layers: bool = False
    save_layers: bool = False
    arena: str = ""
    attach: Attach | None = None
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)
    idle: bool = False
    want_layout: bool = False


class Tally(NamedTuple):
    """How many ranks have ended a plan, and how many of them failed."""

    ranks: int
    failed: int


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Plans that ended on some ranks, by id."""

    loads: dict[int, Tally] = field(default_factory=dict)
    saves: dict[int, Tally] = field(default_factory=dict)
    layouts: "dict[int, WorkerLayout]" = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Add another rank's reports."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            _add(self.loads, other.loads), _add(self.saves, other.saves), self.layouts | other.layouts
        )


@dataclass
class WorkerLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's paged KV as it really is, sent to the scheduler once at start. Every field enters the namespace."""

    block_bytes: dict[str, int]
    """Layer -> bytes of one block."""
    shape: str
    """Shape and element type of one block of each layer, as text."""
    backend: str
    isa: str
    element_bytes: int


def _add(left: dict[int, Tally], right: dict[int, Tally]) -> dict[int, Tally]:
    total = dict(left)
    for key, tally in right.items():
        mine = total.get(key, Tally(0, 0))
        total[key] = Tally(mine.ranks + tally.ranks, mine.failed + tally.failed)
    return total
