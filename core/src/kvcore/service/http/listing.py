"""Listings that are read page by page, in slices between which everything else goes on."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from kvcore.api import ObjectKey
from kvcore.l1 import ObjectSpace
from kvcore.service.http.models import ObjectModel
from kvcore.service.inspect.stored import SLICE, Row
from kvcore.service.problems import Problem

PAGE_S = 2.0
"""After so long a page is given out as it is: few objects of a large tier may be of the namespace that is asked for."""
KEPT_S = 60.0
MAX_LISTINGS = 8


async def resident(spaces: Sequence[ObjectSpace]) -> AsyncIterator[Sequence[Row]]:
    """What is in L1: those that were there when the listing came to their space, and still are."""
    for space in spaces:
        hashes = list(space.objects)  # in one go: nobody can change the table meanwhile
        for at in range(0, len(hashes), SLICE):
            here = [h for h in hashes[at : at + SLICE] if h in space.objects]
            yield [(ObjectKey(space.namespace, h, space.group), space.nbytes, None) for h in here]
            await asyncio.sleep(0)


class Listings:
    """Listings of which some page has been given out. On one loop; a listing that nobody goes on with is dropped after
    `KEPT_S`."""

    def __init__(self) -> None:
        self._open: dict[str, _Listing] = {}

    async def page(
        self, start: Callable[[], AsyncIterator[Sequence[Row]]], what: Any, cursor: str | None, limit: int
    ) -> tuple[list[ObjectModel], str | None]:
        """The first page of what `start` lists, or the one at `cursor`, and the cursor of the next.

        Args:
            what: of what it is a listing: a cursor is only good for the same.
        """
        if cursor is None:
            listing = _Listing(start(), what)
        else:
            found = self._open.pop(cursor, None)
            if found is None or found.what != what:
                if found is not None:
                    self._keep(cursor, found)
                text = "the cursor is not of this listing, was used before, or is older than a minute: begin again"
                raise Problem(410, "cursor-gone", f"{text} without one")
            listing = found
        listing.forget()
        rows, more = await listing.take(limit)
        following = None
        if more:
            following = secrets.token_urlsafe(12)
            self._keep(following, listing)
        return rows, following

    def _keep(self, cursor: str, listing: "_Listing") -> None:
        while len(self._open) >= MAX_LISTINGS:
            self._open.pop(next(iter(self._open))).forget()
        self._open[cursor] = listing
        listing.timer = asyncio.get_running_loop().call_later(KEPT_S, self._open.pop, cursor, None)


class _Listing:
    def __init__(self, source: AsyncIterator[Sequence[Row]], what: Any) -> None:
        self.what = what
        self.timer: asyncio.TimerHandle | None = None
        self._source = source
        self._left: list[Row] = []

    def forget(self) -> None:
        """It is going on, or over."""
        if self.timer is not None:
            self.timer.cancel()

    async def take(self, limit: int) -> tuple[list[ObjectModel], bool]:
        """At most `limit` objects, and whether there may be more."""
        give_up = time.monotonic() + PAGE_S
        found: list[ObjectModel] = []
        while True:
            some, self._left = self._left[: limit - len(found)], self._left[limit - len(found) :]
            found += [_model(*row) for row in some]
            if len(found) == limit or time.monotonic() > give_up:
                return found, True
            with suppress(StopAsyncIteration):
                self._left += await anext(self._source)
                continue
            return found, False


def _model(key: ObjectKey, nbytes: int, used_s: float | None) -> ObjectModel:
    used = None if used_s is None else datetime.fromtimestamp(used_s, UTC)
    return ObjectModel.model_construct(name=key.name, nbytes=nbytes, used=used)
