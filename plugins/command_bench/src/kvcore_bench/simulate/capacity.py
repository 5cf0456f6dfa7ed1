"""Capacities: in bytes, tokens, blocks or shares of the working set, and the sweep that is used when none is given."""

import re
from typing import NamedTuple

from kvcore.api.errors import KVCoreError
from kvcore.api.units import brief, format_size, parse_size
from kvcore_bench.simulate.trace import Trace

HALVINGS = 8
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(%|blocks?|tokens?)\Z")
_FORMS = "4GiB, 10%, 2000000tokens or 4096blocks"


class Capacity(NamedTuple):
    """Room for so many blocks. `nbytes` is None where bytes per token are not known."""

    blocks: int
    tokens: int
    nbytes: int | None

    @property
    def label(self) -> str:
        """Bytes where they are known, else tokens."""
        return format_count(self.tokens) if self.nbytes is None else format_size(self.nbytes)


def capacities(text: str | None, trace: Trace, bytes_per_token: int | None) -> list[Capacity]:
    """What `text` lists, each once and the smallest first. Without one, the working set and its halves; or as sizes,
    powers of two.

    Raises `KVCoreError` for what is no capacity, holds not one block, or is in bytes when those per token are unknown.
    """
    scale = _Scale(trace.distinct, trace.block_tokens, bytes_per_token)
    found = scale.sweep() if text is None else [scale.parse(word.strip()) for word in text.split(",")]
    return sorted({c.blocks: c for c in found}.values())


class _Scale(NamedTuple):
    """What capacities of one trace are measured by."""

    working_set: int
    """Blocks."""
    block_tokens: int
    bytes_per_token: int | None

    def sweep(self) -> list[Capacity]:
        if self.bytes_per_token is None:
            return [self._of_blocks(-(-self.working_set >> n)) for n in range(HALVINGS)]
        block_bytes = self.block_tokens * self.bytes_per_token
        most = 1 << (self.working_set * block_bytes - 1).bit_length()
        return [self._of_bytes(most >> n) for n in range(HALVINGS) if most >> n >= block_bytes]

    def parse(self, word: str) -> Capacity:
        if match := _NUMBER.match(word):
            unit = {"%": self.working_set / 100, "b": 1, "t": 1 / self.block_tokens}[match[2][0]]
            found = self._of_blocks(int(float(match[1]) * unit))
        else:
            try:
                nbytes = parse_size(word)
            except ValueError:
                text = f"--capacity: {brief(word)} is no capacity: write {_FORMS}, with commas between"
                raise KVCoreError(text) from None
            if self.bytes_per_token is None:
                raise KVCoreError(f"--capacity {word} needs --bytes-per-token, the KV of one token, such as 128KiB")
            found = self._of_bytes(nbytes)
        if found.blocks < 1:
            raise KVCoreError(f"--capacity {word} does not hold one block of {self.block_tokens} tokens")
        return found

    def _of_blocks(self, blocks: int) -> Capacity:
        tokens = blocks * self.block_tokens
        return Capacity(blocks, tokens, None if self.bytes_per_token is None else tokens * self.bytes_per_token)

    def _of_bytes(self, nbytes: int) -> Capacity:
        assert self.bytes_per_token is not None
        blocks = nbytes // (self.block_tokens * self.bytes_per_token)
        return Capacity(blocks, blocks * self.block_tokens, nbytes)


def format_count(number: float) -> str:
    """`number` with a decimal unit: `93.6M`."""
    for unit in ("", "k", "M", "G"):
        if number < 1000 or unit == "G":
            return f"{number:.3g}{unit}"
        number /= 1000
    raise AssertionError
