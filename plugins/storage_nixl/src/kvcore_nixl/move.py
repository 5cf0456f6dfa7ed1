"""One object between its file and the caller's memory."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from kvcore_nixl.agent import Job, Piece
from kvcore_nixl.lanes import address
from kvcore_nixl.memory import Buffers, Span, spans


class Move:
    """Plans what NIXL moves in place and what is copied through `staging`, and copies that.

    Args:
        path: for messages.
        fd: the open file.
        nbytes: the object's length, at most that of `buffers`.
        page: what offsets, lengths and addresses must be multiples of; 1: nothing.
    """

    def __init__(self, path: str, fd: int, buffers: Buffers, nbytes: int, page: int) -> None:
        self.path, self.fd, self.nbytes = path, fd, nbytes
        self.error = ""
        self.staged_bytes = 0
        self.staging: Any = None
        """An array of `staged_bytes`, given by the caller once `plan` has said how many."""
        self._buffers = buffers
        self._page = page
        self._spans: list[Span] = []

    def plan(self, usable: Callable[[int, int], bool]) -> None:
        """Find out what needs a copy. `usable`: may NIXL go to this address, for that many bytes?"""
        self._spans = spans(self._buffers.places, self.nbytes, self._page, usable)
        self.staged_bytes = sum(s.end - s.start for s in self._spans if s.address is None)

    def in_place(self) -> list[tuple[int, int]]:
        """Address and length of what needs none."""
        return [(s.address, s.end - s.start) for s in self._spans if s.address is not None]

    def job(self, *, whole_pages: bool) -> Job:
        """What NIXL is asked to do. `whole_pages`: not the page that the file's end cuts: a read of it would come back
        short, which NIXL takes for a failure."""
        pieces = [Piece(s.address, s.end - s.start, s.start) for s in self._spans if s.address is not None]
        for span, memory in self._copied():
            end = self._last_page if whole_pages else span.end
            if span.start < min(end, span.end):
                pieces.append(Piece(address(memory), min(end, span.end) - span.start, span.start))
        return Job(self.fd, "", pieces)

    def read_tail(self) -> None:
        """Read the page that the file's end cuts, past NIXL."""
        for span, memory in self._copied():
            at, count = self._last_page, self.nbytes - self._last_page
            if count and span.end > at:
                page = memory[at - span.start :][: self._page]
                try:
                    if os.preadv(self.fd, [memoryview(page)], at) < count:
                        self.error = "the file has become shorter"
                except OSError as error:
                    self.error = error.strerror or str(error)

    def stage(self) -> None:
        """Copy what needs it before a write. Nothing of another object may reach the device behind this one."""
        for span, memory in self._copied():
            inside = min(span.end, self.nbytes) - span.start
            self._buffers.copy_to(memory[:inside], span.start)
            memory[inside:] = 0

    def unstage(self) -> None:
        """Copy what needs it after a read."""
        for span, memory in self._copied():
            self._buffers.copy_from(memory[: min(span.end, self.nbytes) - span.start], span.start)

    @property
    def _last_page(self) -> int:
        return self.nbytes // self._page * self._page

    def _copied(self) -> Iterator[tuple[Span, Any]]:
        """The spans that need a copy, each with its part of the staging memory."""
        at = 0
        for span in self._spans:
            if span.address is None:
                yield span, self.staging[at : at + span.end - span.start]
                at += span.end - span.start
