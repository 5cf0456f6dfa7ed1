"""The serde interface: how a payload is encoded on its way to a tier."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kvcore.api.layout import ObjectLayout

MAX_STAGES = 8
"""Most serdes of one tier: what the header of a frame has room for."""


class Serde(ABC):
    """One stage of a tier's chain, as in Zarr: stages encode in the order written and decode in reverse.

    Calls come from several threads at once, so a serde keeps no state between calls; heavy ones release the GIL.
    """

    lossy: ClassVar[bool] = False
    """True: decoded bytes may differ from the source. The serde's `tag` then enters the namespace."""
    sealing: ClassVar[bool] = False
    """True: the serde encrypts or signs. What it encodes is stored even where that is longer, and a tier that has it
    takes nothing from its storage that it has not encoded."""

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    @property
    @abstractmethod
    def tag(self) -> str:
        """1 to 32 characters of `[a-z0-9._/-]`, written into the frame: the name and format version of the encoding,
        such as `zstd/1`. `decode` must read whatever any release wrote under the same tag, whatever its config."""

    @abstractmethod
    def encode(self, source: memoryview, layout: ObjectLayout) -> "bytes | bytearray | memoryview":
        """The encoded form of `source` (contiguous unsigned bytes). `layout` describes the original payload."""

    @abstractmethod
    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        """Decode `source` so that it fills `into`, which has exactly the length of what was encoded.

        Raises `SerdeError` when `source` is not what `encode` writes or does not fill `into` exactly, and
        `SerdeUnavailable` when it cannot be told here, for want of a key.
        """

    @abstractmethod
    def max_encoded_bytes(self, nbytes: int) -> int:
        """An upper bound of what `encode` returns for `nbytes` of input."""

    def bound(self, to: bytes) -> "Serde":
        """The serde for one object, asked for when it is `sealing`. `to` stands for the object's key and for the stages
        up to this one: a serde that signs covers it, so that it takes no object under another's name."""
        return self
