"""Keys: what names an object everywhere, and the interface of a key generator."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

NAMESPACE_BYTES = 16
NAMESPACE_LEAST = 6
"""Of its hexadecimal characters, so many from the first on may stand for a namespace where people name one."""
MIN_HASH_BYTES = 16
MAX_HASH_BYTES = 64


class ObjectKey(NamedTuple):
    """The name of one object: the KV of one chunk for one KV cache group.

    `namespace` (16 bytes) is the fingerprint of all that KV must not be mixed across; `chunk_hash` (16 to 64 bytes,
    usually 32) covers the chunk's tokens and every token before it; `group` is the KV cache group (0 for most models).
    """

    namespace: bytes
    chunk_hash: bytes
    group: int = 0

    @property
    def name(self) -> str:
        """A unique printable name of `[0-9a-f-]` only, safe in file names, URLs and Redis keys."""
        return f"{self.namespace.hex()}-{self.group:x}-{self.chunk_hash.hex()}"

    @classmethod
    def from_name(cls, name: str) -> "ObjectKey":
        """The key whose `name` this is. Raises `ValueError` for anything `name` cannot have written."""
        namespace, group, chunk_hash = name.split("-")
        key = cls(bytes.fromhex(namespace), bytes.fromhex(chunk_hash), int(group, 16))
        if (
            len(key.namespace) != NAMESPACE_BYTES
            or not MIN_HASH_BYTES <= len(key.chunk_hash) <= MAX_HASH_BYTES
            or key.name != name
        ):
            raise ValueError(f"not the name of an object: {name!r}")
        return key


@dataclass(frozen=True, slots=True)
class KeySource:
    """What a key generator may draw on for one request. An engine fills what it has.

    Args:
        chunk_tokens: tokens per chunk.
        block_tokens: tokens per engine block; divides `chunk_tokens`.
        tokens: the request's token ids so far, as a sequence of ints or a contiguous buffer of uint32.
        block_hashes: the engine's own chained hash of each full block so far.
        extra: whatever else the KV depends on from the first token on (LoRA, salt), in a canonical encoding.
        chunk_extra: chunk index -> what else that chunk depends on (multimodal hashes), canonical.
    """

    chunk_tokens: int
    block_tokens: int
    tokens: "Sequence[int] | memoryview" = ()
    block_hashes: Sequence[bytes] = ()
    extra: bytes = b""
    chunk_extra: Mapping[int, bytes] = field(default_factory=dict)


class KeyGenerator(ABC):
    """Turns a request into one hash per full chunk. Chosen by `keys:`.

    The hash of a chunk must depend on everything before it, so that equal hashes mean an equal prefix.
    """

    scheme: ClassVar[str]
    """Name and version of the derivation, part of the namespace: other bytes out need another scheme."""

    def __init__(self, config: object, context: object) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    @abstractmethod
    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        """The hashes of the full chunks of `source` that follow the first `len(known)`.

        `known` is what earlier calls for the same request returned, so that a growing request is not hashed again.
        Never raises for a source without a full chunk: it returns an empty list.
        """
