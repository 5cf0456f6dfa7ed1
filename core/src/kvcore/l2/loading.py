"""Loads through a tier: frames are read, checked and decoded into the caller's memory."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from kvcore.api import BlockingStorage, Failed, FrameError, Item, Loaded, LoadOutcome, Storage
from kvcore.l2 import frame
from kvcore.l2.buffers import headers
from kvcore.l2.codec import Payload
from kvcore.l2.parcels import Moved, Parcel
from kvcore.l2.threads import DeadlineExceeded
from kvcore.l2.tools import Tools

KEEP = ("version", "unknown_serde")
"""Frames that another release or configuration may still read: they are misses, and stay."""
SEAL_BYTES = 4096
"""A sealed payload is longer than a plain one by less."""
_GIVEN_UP = Failed("nobody waits for it any more", "closed")


class Loader:
    """One tier's loads."""

    def __init__(self, storage: Storage | BlockingStorage, tools: Tools) -> None:
        self._codec, self._calls, self._staging, self._record, self._on_thread, self._delete = tools
        # An asyncio storage may have handed the buffers to a thread that outlives its cancellation: such a thread
        # must never write into a slot that has been given to another object.
        self._direct = tools.codec.plain and (storage.zero_copy or isinstance(storage, BlockingStorage))
        self._hanging = 0
        """Calls that may still write into the payloads of loads that are over."""

    async def load(
        self, wanted: Sequence[Parcel], held: Callable[[], bool], turn: AbstractAsyncContextManager[None]
    ) -> Moved[LoadOutcome]:
        """See `Tier.load`. While a call hangs that was lent payloads, the next are not lent any.

        Args:
            turn: the storage is called within it; what is decoded afterwards holds up no other's.
        """
        async with turn:
            begun = time.perf_counter()
            pages = headers(len(wanted))
            in_place = self._direct and not self._hanging
            try:
                room = [self._codec.max_encoded_bytes(t.nbytes) for t in wanted]
            except Exception as error:  # a serde's own bug
                return Moved([Failed(f"its serde cannot say how long it encodes: {error!r}", "serde")] * len(wanted))
            if in_place and not held():
                return Moved([_GIVEN_UP] * len(wanted))
            staged = [] if in_place else [self._staging.take(n) for n in room]
            bodies: list[Payload] = (
                [(memoryview(b)[:n],) for b, n in zip(staged, room, strict=True)]
                if staged
                else [t.payload for t in wanted]
            )
            items = [Item(t.key, (h, *b)) for t, h, b in zip(wanted, pages, bodies, strict=True)]
            outcomes: list[LoadOutcome] = []

            def check(raw: Sequence[LoadOutcome]) -> None:
                outcomes.extend(self._decode(wanted, pages, bodies, raw))

            try:
                # Memory that is lent is checked by the thread that has read into it.
                raw = await self._calls.load(items, check if in_place else None)
            except DeadlineExceeded as error:
                lost = self._record.failed("load", len(wanted), error)
                if not in_place or error.settled is None:  # what comes late lands in a staging buffer
                    return Moved(lost)
                self._hanging += 1
                error.settled.add_done_callback(self._settled)
                return Moved(lost, error.settled)
            except Exception as error:
                return Moved(self._record.failed("load", len(wanted), error))
            self._record.answered("load", raw, time.perf_counter() - begun)
        if not (in_place or held()):
            return Moved([_GIVEN_UP] * len(wanted))
        if not outcomes:
            try:
                outcomes = await self._on_thread("decoding", self._decode, wanted, pages, bodies, raw)
            except DeadlineExceeded as error:
                return Moved(self._record.failed("load", len(wanted), error), error.settled)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Failed) and outcome.kind == "too_large":
                outcomes[i] = await self._too_large(wanted[i], outcome)
        del items
        for (view, *_), buffer in zip(bodies, staged, strict=False):
            with suppress(BufferError):  # a storage that still holds a view keeps the buffer, too
                view.release()
                self._staging.give(buffer)
        self._record.count("load", outcomes, sum(o.nbytes for o in outcomes if isinstance(o, Loaded)), begun)
        failed = [(t.key, o.kind) for t, o in zip(wanted, outcomes, strict=True) if isinstance(o, Failed)]
        self._record.remember(key for key, kind in failed if kind in KEEP)
        corrupt = [key for key, kind in failed if kind == "corrupt"]
        if corrupt:
            self._record.warn("corrupt", f"{len(corrupt)} corrupt objects are deleted")
            await self._delete(corrupt)
        return Moved(outcomes)

    def _settled(self, call: object) -> None:
        self._hanging -= 1

    def _decode(
        self,
        wanted: Sequence[Parcel],
        pages: Sequence[memoryview],
        bodies: Sequence[Payload],
        raw: Sequence[LoadOutcome],
    ) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        for parcel, page, body, outcome in zip(wanted, pages, bodies, raw, strict=True):
            if isinstance(outcome, Loaded):
                try:
                    self._codec.decode(parcel.key, page, body, outcome.nbytes, parcel.payload, parcel.layout)
                except FrameError as error:
                    kind = error.reason if error.reason in KEEP else "corrupt"
                    outcome = Failed(f"{error.reason}: {error}", kind)  # noqa: PLW2901
                except Exception as error:  # a serde's own bug is a miss, not a crash
                    outcome = Failed(f"decoding failed: {error!r}", "serde")  # noqa: PLW2901
            outcomes.append(outcome)
        return outcomes

    async def _too_large(self, parcel: Parcel, outcome: Failed) -> LoadOutcome:
        """What is larger than any frame of this chain is damaged, unless another configuration has sealed it."""
        (page,), body = headers(1), memoryview(bytearray(parcel.nbytes + SEAL_BYTES))
        try:
            (raw,) = await self._calls.load([Item(parcel.key, (page, body))])
            if not isinstance(raw, Loaded):
                larger = isinstance(raw, Failed) and raw.kind == "too_large"
                return Failed(outcome.reason, "corrupt") if larger else raw
            stages = frame.unpack(parcel.key, page, raw.nbytes).stages
        except FrameError as error:
            return Failed(f"{error.reason}: {error}", error.reason if error.reason in KEEP else "corrupt")
        except Exception as error:
            return Failed(f"it was too large, and was not read again: {error!r}")
        if not stages or stages[0].input_bytes != parcel.nbytes:
            return Failed(outcome.reason, "corrupt")
        return Failed(f"encoded by {stages[-1].tag}, which this tier's chain has not", "unknown_serde")
