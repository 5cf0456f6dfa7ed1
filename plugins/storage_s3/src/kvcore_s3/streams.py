"""Objects between the caller's buffers and a request's or a response's body, without joining them."""

import os
from collections.abc import Callable, Sequence

from urllib3 import BaseHTTPResponse

from kvcore_s3.call import Call
from kvcore_s3.faults import CutShort

READ_BYTES = 256 << 10
"""Read at a time, at most: between two reads other threads run and the deadline is looked at."""


class Body:
    """The concatenation of buffers as a seekable file, for botocore to sign and urllib3 to send.

    Args:
        check: called before each read; what it raises ends the request.
    """

    def __init__(self, buffers: Sequence[memoryview], check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._views = [view for view in buffers if len(view)]
        self._nbytes = sum(map(len, self._views))
        self._at = 0

    def __len__(self) -> int:
        return self._nbytes

    def __bool__(self) -> bool:
        return True  # an empty object is an object

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, and return the new position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = None) -> memoryview | bytes:
        """Up to `size` bytes, as a view into one of the buffers; all the rest without `size`; empty at the end."""
        self._check()
        if size is None or size < 0:
            rest = b"".join(part(self._views, self._at, self._nbytes))
            self._at += len(rest)
            return rest
        start = self._at
        for view in self._views:
            if start < len(view):
                piece = view[start : start + size]
                self._at += len(piece)
                return piece
            start -= len(view)
        return b""


def part(buffers: Sequence[memoryview], offset: int, nbytes: int) -> list[memoryview]:
    """Up to `nbytes` of the concatenation, from `offset`."""
    found = []
    for view in buffers:
        if nbytes <= 0:
            break
        if offset < len(view):
            piece = view[offset : offset + nbytes]
            found.append(piece)
            nbytes -= len(piece)
            offset = 0
        else:
            offset -= len(view)
    return [piece for piece in found if len(piece)]


def receive(response: BaseHTTPResponse, views: Sequence[memoryview], call: Call, name: str) -> None:
    """Fill `views` from a response. Raises `CutShort` when it ends before, `Fault` when the time is up, or what urllib3
    raises."""
    for view in views:
        at = 0
        while at < len(view):
            call.check_time(name)
            got = response.read1(min(READ_BYTES, len(view) - at))  # what has come; not all, which may take for ever
            if not got:
                raise CutShort(f"the answer ended {len(view) - at} bytes too early")
            view[at : at + len(got)] = got
            at += len(got)
