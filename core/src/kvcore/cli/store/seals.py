"""Whether a frame that is copied as it is can be read where it goes, as far as serdes that seal decide it."""

from collections.abc import Sequence

from kvcore.api import ObjectLayout, Serde, SerdeError
from kvcore.l2 import frame
from kvcore.l2.frame import HEADER_BYTES
from kvcore.l2.frames import Found

_LAYOUT = ObjectLayout(1, 1, (1,), "uint8", 1)  # sealing serdes look at bytes


class Seals:
    """Of one copy. Args: the serdes of the tier that is read, and of the one that is written."""

    def __init__(self, source: Sequence[Serde], target: Sequence[Serde]) -> None:
        self._there = {s.tag: s for s in target if s.sealing}
        self._foreign = {s.tag for s in source if s.sealing} - set(self._there)

    def fault(self, found: Found) -> str | None:
        """Why the target's tier would refuse this whole frame, or None."""
        if foreign := self._foreign.intersection(found.tags):
            return f"encoded by {', '.join(foreign)}, which TO has not"
        if missing := self._there.keys() - set(found.tags):
            return f"not encoded by {', '.join(missing)}, as all of TO's objects are; frames are copied as they are"
        if not self._there:
            return None
        stages = frame.unpack(found.key, found.data[:HEADER_BYTES], found.nbytes).stages
        if (serde := self._there.get(stages[-1].tag)) is None:
            return None  # something stands behind it: only decoding would tell
        try:
            bound = serde.bound(frame.binding(found.key, stages))
            bound.decode(found.data[HEADER_BYTES:], memoryview(bytearray(stages[-1].input_bytes)), _LAYOUT)
        except SerdeError as error:
            return f"{serde.tag} of TO does not take it: {error}"
        return None
