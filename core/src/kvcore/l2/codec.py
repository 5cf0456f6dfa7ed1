"""A payload through its serde chain and into a frame, and back. Synchronous: runs on threads, without state.

A payload is several ranges of memory, one after the other. They are joined only for a serde, which needs one range.
"""

from collections.abc import Callable, Sequence

from kvcore.api import FrameError, ObjectKey, ObjectLayout, Serde, SerdeError, SerdeUnavailable, fill
from kvcore.api.buffers import take
from kvcore.l2 import frame
from kvcore.l2.frame import HEADER_BYTES, Stage

Resolve = Callable[[str], Serde | None]
"""Finds the serde that reads a tag, or None."""
Payload = Sequence[memoryview]
"""Contiguous ranges of unsigned bytes, one after the other."""


class Codec:
    """Encodes with the configured chain; decodes whatever chain the frame names.

    Args:
        chain: the tier's serdes in order; empty stores payloads as they are.
        resolve: finds serdes of other tags, so that a changed configuration still reads what is stored.
    """

    def __init__(self, chain: Sequence[Serde], resolve: Resolve) -> None:
        self.chain = tuple(chain)
        self._resolve = resolve
        self._by_tag = {serde.tag: serde for serde in chain}
        self._seals = {serde.tag for serde in chain if serde.sealing}
        self._whatever_size = any(serde.lossy or serde.sealing for serde in chain)

    @property
    def plain(self) -> bool:
        """Payloads are stored as they are, so they can go straight from and to L1."""
        return not self.chain

    def max_encoded_bytes(self, nbytes: int) -> int:
        """Room that any stored payload of `nbytes` may need: one that grew is kept plain."""
        most = nbytes
        for serde in self.chain:
            most = max(most, serde.max_encoded_bytes(most))
        return most

    def encode(self, key: ObjectKey, payload: Payload, layout: ObjectLayout, header: memoryview) -> Payload:
        """Fill `header` and return the payload to store: `payload` itself when the chain gains nothing."""
        nbytes = sum(map(len, payload))
        if self.chain:
            data, stages = joined(payload), []
            for serde in self.chain:
                stages.append(Stage(serde.tag, len(data)))
                bound = serde.bound(frame.binding(key, stages)) if serde.sealing else serde
                data = memoryview(bound.encode(data, layout)).cast("B")
            if len(data) < nbytes or self._whatever_size:
                frame.pack(key, len(data), stages, frame.checksum(data), header)
                return (data,)
        frame.pack(key, nbytes, [], frame.checksum(payload), header)
        return payload

    def decode(
        self, key: ObjectKey, header: memoryview, body: Payload, stored: int, into: Payload, layout: ObjectLayout
    ) -> None:
        """Check a stored frame and bring its payload into `into`. Raises `FrameError`.

        `body` is the memory that the payload was read into: `into` itself, when it was read in place.
        """
        found = frame.unpack(key, header, stored)
        original = found.stages[0].input_bytes if found.stages else found.payload_bytes
        nbytes = sum(map(len, into))
        if original != nbytes or found.payload_bytes > sum(map(len, body)):
            raise FrameError("length", f"holds {original} bytes, the object has {nbytes}")
        if missing := self._seals.difference(stage.tag for stage in found.stages):
            raise FrameError("unsealed", f"is not encoded by {', '.join(missing)}, as all of this tier's objects are")
        parts = take(body, found.payload_bytes)
        if frame.checksum(parts) != found.checksum:
            raise FrameError("checksum", "the payload's checksum does not match")
        if not found.stages:
            if body is not into:
                fill(into, joined(parts))
            return
        # encoded bytes that were read in place: decoding must not overwrite its own source
        data = memoryview(b"".join(parts)) if body is into else joined(parts)
        for i in range(len(found.stages) - 1, -1, -1):
            stage = found.stages[i]
            serde = self._by_tag.get(stage.tag) or self._find(stage.tag)
            if stage.input_bytes > 4 * nbytes + HEADER_BYTES:
                raise FrameError("header", f"stage {stage.tag} claims {stage.input_bytes} bytes")
            last = i == 0 and len(into) == 1
            target = into[0] if last else memoryview(bytearray(stage.input_bytes))
            if serde.sealing:
                serde = serde.bound(frame.binding(key, found.stages[: i + 1]))
            try:
                serde.decode(data, target, layout)
            except SerdeUnavailable as error:
                raise FrameError("unknown_serde", f"{stage.tag}: {error}") from error
            except SerdeError as error:
                raise FrameError("serde", f"{stage.tag}: {error}") from error
            data = target
        if len(into) != 1:
            fill(into, data)

    def _find(self, tag: str) -> Serde:
        serde = self._resolve(tag)
        if serde is None:
            raise FrameError("unknown_serde", f"no installed serde reads {tag!r}")
        self._by_tag[tag] = serde
        return serde


def joined(payload: Payload) -> memoryview:
    """A payload as one range: itself where it is one, else a copy."""
    return payload[0] if len(payload) == 1 else memoryview(b"".join(payload))
