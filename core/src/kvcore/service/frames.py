"""Where one message ends and the next begins: a length of four bytes before each."""

from collections.abc import Iterator

from kvcore.engine.attach import LENGTH

MAX_FRAME = 8 << 20
"""Bytes of the longest message."""


class ProtocolError(Exception):
    """The other side does not keep to the protocol: its connection is closed."""


class Frames:
    """Cuts what arrives into messages. Never holds more than a frame and what came with it."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        """The longest frame that is taken from here on."""
        self._rest = bytearray()

    def cut(self, data: memoryview) -> Iterator[memoryview]:
        """The messages that end in `data`; each is good until the next one is asked for. Raises `ProtocolError` for a
        frame that is longer than the limit, before any of it is kept."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < LENGTH.size or len(rest) - LENGTH.size < LENGTH.unpack_from(rest)[0] <= self.limit:
                return  # a long message, not yet all there
            self._rest = bytearray()
            data = memoryview(rest)
        at, end = 0, len(data)
        while end - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if length > self.limit:
                raise ProtocolError(f"a message of {length} bytes, at most {self.limit} are taken")
            begin = at + LENGTH.size
            if end - begin < length:
                break
            at = begin + length
            yield data[begin:at]
        self._rest += data[at:]
