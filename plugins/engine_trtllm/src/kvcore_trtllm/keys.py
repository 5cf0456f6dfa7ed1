"""Block hashes from token ids. TensorRT-LLM's own are 64 bits long, too short to name objects that others share."""

import hashlib
import struct
from collections.abc import Sequence

KEY_SCHEME = "trtllm-sha256/1"


class Chain:
    """One request's block hashes: a SHA-256 chain over token ids, each as a little-endian uint32.

    Args:
        block_tokens: tokens per block. salt: what else its KV depends on.
    """

    def __init__(self, block_tokens: int, salt: str) -> None:
        self._pack = struct.Struct(f"<{block_tokens}I").pack
        self._size = block_tokens
        raw = salt.encode(errors="surrogatepass")
        self._parent = hashlib.sha256(f"kvcore {KEY_SCHEME}\0{len(raw)}\0".encode() + raw).digest()
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of all full blocks of the tokens, which begin with those of earlier calls."""
        for at in range(len(self.hashes) * self._size, len(tokens) - self._size + 1, self._size):
            self._parent = hashlib.sha256(self._parent + self._pack(*tokens[at : at + self._size])).digest()
            self.hashes.append(self._parent)
        return self.hashes
