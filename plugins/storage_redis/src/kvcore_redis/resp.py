"""RESP2, as far as objects need it: commands out, lines and values in. Knows no sockets.

A value goes from the source straight into the caller's buffers. Only what arrived together with its header, at most
`BUFFER_BYTES`, is copied.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcore.api.buffers import drop, take

BUFFER_BYTES = 4096
_SCRATCH_BYTES = 1 << 20
_KINDS = b"+-:$*"
_PASSING = ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")


class ProtocolError(ConnectionError):
    """What came is no answer to what was asked: the connection is of no further use."""


class ReplyError(NamedTuple):
    """The server's refusal, such as `OOM command not allowed when used memory > 'maxmemory'.`"""

    text: str

    @property
    def code(self) -> str:
        """Its first word."""
        return self.text.partition(" ")[0]

    @property
    def passing(self) -> bool:
        """It says that the server cannot serve now, not that we may not be served."""
        return self.text.startswith("ERR max number of clients") or self.code in _PASSING


class Source(Protocol):
    """Where bytes come from. Both methods raise `OSError` when they cannot go on."""

    def receive(self, into: memoryview) -> int:
        """At least one byte, at most `into` full; how many."""

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill `views` one after the other."""


def encode(*words: bytes) -> bytes:
    """A command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def encode_set(name: bytes, nbytes: int, ttl_ms: int | None) -> tuple[bytes, bytes]:
    """What goes before and what goes behind the `nbytes` of a value that is SET."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 if ttl_ms is None else 5, len(name), name, nbytes)
    if ttl_ms is None:
        return head, b"\r\n"
    digits = b"%d" % ttl_ms
    return head, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(digits), digits)


class Reader:
    """The replies that come out of `source`, in order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._crlf = memoryview(bytearray(2))

    @property
    def empty(self) -> bool:
        """Nothing is left of what was received."""
        return self._start == self._end

    def line(self) -> bytes | int | ReplyError:
        """A reply of one line: a status, a number, or a refusal. Raises `ProtocolError` and what the source raises."""
        kind, rest = self._line()
        if kind == b"+":
            return rest
        if kind == b":":
            return _number(rest)
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        raise ProtocolError(f"expected a line, got {(kind + rest)[:40]!r}")

    def value(self, buffers: Sequence[memoryview]) -> int | ReplyError | None:
        """The length of a value, which is now in `buffers`; None: there is none.

        One that is longer than the buffers is read and thrown away, so that the next reply can be read.
        """
        kind, rest = self._line()
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        if kind != b"$":
            raise ProtocolError(f"expected a value, got {(kind + rest)[:40]!r}")
        nbytes = _number(rest)
        if nbytes < 0:
            return None
        if nbytes > sum(map(len, buffers)):
            self._throw_away(nbytes)
            self._fill([self._crlf])
        else:
            self._fill([*take(buffers, nbytes), self._crlf])
        if bytes(self._crlf) != b"\r\n":
            raise ProtocolError("a value is longer than its header says")
        return nbytes

    def _line(self) -> tuple[bytes, bytes]:
        """A line's first byte and the rest of it."""
        scanned = self._start
        while (at := self._buffer.find(b"\r\n", scanned, self._end)) < 0:
            scanned = max(self._start, self._end - 1)
            if self._end == BUFFER_BYTES:
                kept = self._end - self._start
                if kept == BUFFER_BYTES:
                    raise ProtocolError(f"a line of more than {BUFFER_BYTES} bytes")
                self._buffer[:kept] = self._buffer[self._start : self._end]
                scanned -= self._start
                self._start, self._end = 0, kept
            self._end += self._source.receive(self._view[self._end :])
            if self._buffer[self._start] not in _KINDS:  # seen before the line ends: other servers' lines may not
                got = bytes(self._view[self._start : min(self._end, self._start + 40)])
                raise ProtocolError(f"expected a reply, got {got!r}: is it a Redis server?")
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        if self._start == self._end:
            self._start = self._end = 0
        return line[:1], line[1:]

    def _fill(self, views: list[memoryview]) -> None:
        """With what is in the buffer, then from the source."""
        while views and self._start < self._end:
            count = min(len(views[0]), self._end - self._start)
            views[0][:count] = self._view[self._start : self._start + count]
            self._start += count
            views = drop(views, count)
        if self._start == self._end:
            self._start = self._end = 0
        if views:
            self._source.receive_all(views)

    def _throw_away(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            piece = scratch[: min(nbytes, len(scratch))]
            self._fill([piece])
            nbytes -= len(piece)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError(f"expected a number, got {text[:40]!r}") from None
