"""Block hashes of a sequence."""

import hashlib
import struct
from collections.abc import Sequence

BLOCK_TOKENS = 16
"""Tokens per block: what chunk sizes are multiples of. A block of 4 KiB or more per head is copied at full speed."""
KEY_SCHEME = "transformers-sha256/1"
"""A chain over token ids, each as a little-endian uint32."""
_ROOT = hashlib.sha256(f"kvcore {KEY_SCHEME}".encode()).digest()
_pack = struct.Struct(f"<{BLOCK_TOKENS}I").pack


def block_hashes(tokens: Sequence[int], blocks: int) -> list[bytes]:
    """The hashes of the first so many blocks."""
    chain, parent = [], _ROOT
    for at in range(0, blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        parent = hashlib.sha256(parent + _pack(*tokens[at : at + BLOCK_TOKENS])).digest()
        chain.append(parent)
    return chain
