"""Key generator `engine`: the engine's own block hashes, so that nothing is hashed twice."""

from collections.abc import Sequence
from typing import Any

from kvcore.api import ApiVersion, Component, KeyGenerator, KeySource, LayoutError, hookimpl
from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES


@hookimpl
def kvcore_keys() -> Component:
    """The `engine` key generator."""
    return Component(api=ApiVersion(1, 0), factory=EngineKeys)


class EngineKeys(KeyGenerator):
    """A chunk is named by the hash of its last block, which by the engine's own chaining covers all before it.

    The engine's hashes must cover whatever the KV depends on (LoRA, salt, multimodal input) and, for a cache that
    outlives the process or is shared, be the same in every process. `KeySource.extra` is not looked at.
    """

    scheme = "engine/1"

    def __init__(self, config: Any, context: Any) -> None:
        """Has no options."""

    def extend(self, source: KeySource, known: Sequence[bytes] = ()) -> list[bytes]:
        """See `KeyGenerator.extend`. Raises `LayoutError` for hashes that are not 16 to 64 bytes long."""
        blocks = source.chunk_tokens // source.block_tokens
        if not blocks or blocks * source.block_tokens != source.chunk_tokens:
            raise LayoutError(
                f"keys `engine`: chunk_tokens {source.chunk_tokens} is not a multiple of the engine's block size "
                f"{source.block_tokens}; set chunk_tokens to one, or to auto"
            )
        hashes = list(source.block_hashes[(len(known) + 1) * blocks - 1 :: blocks])
        try:
            lengths = set(map(len, hashes))
        except TypeError:
            lengths = {-1}
        if lengths and (min(lengths) < MIN_HASH_BYTES or max(lengths) > MAX_HASH_BYTES):
            odd = next(h for h in hashes if not isinstance(h, bytes) or not MIN_HASH_BYTES <= len(h) <= MAX_HASH_BYTES)
            what = f"{len(odd)} bytes" if isinstance(odd, bytes) else type(odd).__name__
            raise LayoutError(
                f"keys `engine`: the engine's block hashes are {what}, allowed are {MIN_HASH_BYTES} to "
                f"{MAX_HASH_BYTES} bytes; choose a cryptographic prefix hash in the engine, or `keys: tokens`"
            )
        return hashes
