"""Stores through a tier: payloads are encoded and framed, and written from where they lie."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.api import Failed, Item, Stored, StoreOutcome
from kvcore.l2.buffers import headers
from kvcore.l2.codec import Payload
from kvcore.l2.parcels import Moved, Parcel
from kvcore.l2.threads import DeadlineExceeded
from kvcore.l2.tools import Tools


class Storer:
    """One tier's stores."""

    def __init__(self, tools: Tools) -> None:
        self._codec, self._calls, self._staging, self._record, self._on_thread, self._delete = tools

    async def store(self, given: Sequence[Parcel], held: Callable[[], bool]) -> Moved[StoreOutcome]:
        """See `Tier.store`."""
        begun = time.perf_counter()
        pages = headers(len(given))
        try:
            bodies, staged = await self._on_thread("encoding", self._encode, given, pages)
        except DeadlineExceeded as error:
            return Moved(self._record.failed("store", len(given), error), error.settled)
        if not held():
            return Moved([Failed("the lease ran out before the objects were encoded", "lease_expired")] * len(given))
        unreadable = self._record.unreadable
        replaced = [t.key for t in given if t.key in unreadable]
        if replaced:  # a storage may keep what it has
            await self._delete(replaced)
            unreadable.difference_update(replaced)
        frames: list[Item | Failed] = [
            body if isinstance(body, Failed) else self._offer(Item(t.key, (page, *body)))
            for t, page, body in zip(given, pages, bodies, strict=True)
        ]
        asked = [item for item in frames if isinstance(item, Item)]
        try:
            answers = await self._calls.store(asked) if asked else []
        except DeadlineExceeded as error:
            return Moved(self._record.failed("store", len(given), error), error.settled)
        except Exception as error:
            return Moved(self._record.failed("store", len(given), error))
        if asked:
            self._record.answered("store", answers, 0.0)  # nobody waits for a store
        rest = iter(answers)
        outcomes: list[StoreOutcome] = [frame if isinstance(frame, Failed) else next(rest) for frame in frames]
        written = sum(i.nbytes for i, o in zip(asked, answers, strict=True) if isinstance(o, Stored))
        if not self._codec.plain:
            self._record.metrics.add("serde_bytes", sum(t.nbytes for t in given), self._record.name, "in")
            encoded = sum(sum(map(len, b)) for b in bodies if not isinstance(b, Failed))
            self._record.metrics.add("serde_bytes", encoded, self._record.name, "out")
        del asked, bodies, frames
        for buffer in staged:
            self._staging.give(buffer)
        self._record.count("store", outcomes, written, begun)
        return Moved(outcomes)

    def _encode(self, given: Sequence[Parcel], pages: Sequence[memoryview]) -> tuple[list[Payload | Failed], list[Any]]:
        bodies: list[Payload | Failed] = []
        staged = []
        for parcel, page in zip(given, pages, strict=True):
            try:
                data = self._codec.encode(parcel.key, parcel.payload, parcel.layout, page)
                if data is not parcel.payload:
                    # page-aligned, so that a direct write needs no copy of its own
                    (encoded,) = data
                    buffer = self._staging.take(max(1, len(encoded)))
                    staged.append(buffer)
                    body = memoryview(buffer)[: len(encoded)]
                    body[:] = encoded
                    data = (body,)
            except Exception as error:  # a serde's own bug: this object is not stored, the tier is not to blame
                bodies.append(Failed(f"encoding failed: {error!r}", "serde"))
                continue
            bodies.append(data)
        return bodies, staged

    def _offer(self, item: Item) -> Item | Failed:
        """The item, or why it is not even offered to the storage."""
        limit = self._calls.max_object_bytes
        if limit is not None and item.nbytes > limit:
            return Failed(f"larger than the storage's limit of {limit} bytes", "too_large")
        return item
