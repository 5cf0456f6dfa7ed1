"""What goes through a tier: objects to move, and what has come of each. Blocks of engines are `kvcore.transfer`'s."""

import asyncio
from typing import Any, Generic, NamedTuple, TypeVar

from kvcore.api import LoadOutcome, ObjectKey, ObjectLayout, StoreOutcome
from kvcore.l2.codec import Payload

Outcome = TypeVar("Outcome", LoadOutcome, StoreOutcome)


class Parcel(NamedTuple):
    """One object to move: its key, its payload in the caller's memory, and its layout.

    The payload may lie in several places: contiguous ranges of unsigned bytes, one after the other.
    """

    key: ObjectKey
    payload: Payload
    layout: ObjectLayout

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(map(len, self.payload))


class Moved(NamedTuple, Generic[Outcome]):
    """What has come of a load or a store: an outcome per object, and a future that ends when nobody writes into the
    payloads, or reads them, any more (None: now)."""

    outcomes: list[Outcome]
    settled: "asyncio.Future[Any] | None" = None
