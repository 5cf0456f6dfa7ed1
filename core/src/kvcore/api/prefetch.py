"""Bringing objects into L1 ahead of the request that needs them: what a hook is given to do it with."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Brought(NamedTuple):
    """Objects that were brought into L1 ahead, in all so far. The rest of `brought` is in L1 and not yet asked for.

    Attributes:
        brought: all of them.
        used: a request asked for them while they were there.
        wasted: they left L1 before.
    """

    brought: int = 0
    used: int = 0
    wasted: int = 0


class Prefetch(Protocol):
    """What a cache does ahead. Thread-safe; nothing waits, nothing raises.

    It has nobody's time but what is left over: only while no request waits for a tier, in pieces of some 20 ms, at
    most half of the time while something waits to be written. What it has brought and nobody has asked for yet takes at
    most a quarter of L1, or of its tenant's share. It takes the place of what the eviction policy gives up only where a
    tier has that, too (`write: all`).
    """

    def bring(self, namespace: bytes, hashes: Sequence[bytes], cause: str) -> bool:
        """Load what L1 lacks of this prefix: all its chunks from the first on, of all groups.

        Args:
            namespace: of a model that an engine is using.
            cause: a word for the metrics, such as `queued`. Give few different ones.

        It begins a moment later, and not at all where the request comes before that. False: too many wait, or nobody
        uses the namespace.
        """

    def brought(self, cause: str) -> Brought:
        """What has become of that so far."""

    def room(self, namespace: bytes) -> int:
        """How many bytes may still be brought before some of those that were are used or gone."""

    @property
    def free(self) -> float:
        """The part of L1 that holds nothing, from 0 to 1."""
