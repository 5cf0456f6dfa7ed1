"""Which engine holds how much of a prompt, learned from the engines' KV events.

A block is named by the tokens of the prompt up to its end, not by the engine's hash: the events say which tokens a hash
stands for, so no hash function of any engine needs to be known here, and blocks of all engines have one name.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

ROOT = b""


def names(tokens: Sequence[int], block_size: int, parent: bytes = ROOT) -> Iterable[bytes]:
    """The names of the full blocks of `tokens` that follow the block `parent`."""
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = blake2b(parent + array("I", tokens[at : at + block_size]).tobytes(), digest_size=16).digest()
        yield parent


class EngineIndex:
    """What one engine holds: in vLLM's own prefix cache, in kvcore's memory, in its tiers."""

    def __init__(self) -> None:
        self.block_size = 0
        self._names: dict[Any, bytes] = {}
        self._held: Counter[bytes] = Counter()
        self._coming: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, event: Any) -> None:
        """Blocks came to be somewhere in the engine. A block may be in several places: they are counted."""
        parent = ROOT if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None or event.group_idx or event.extra_keys or event.lora_name:
            return  # its beginning is not known; or a request like it is not routed by its prefix here
        self.block_size = event.block_size
        blocks = names(event.token_ids, event.block_size, parent)
        for block_hash, name in zip(event.block_hashes, blocks, strict=False):
            self._names[block_hash] = name
            self._held[name] += 1

    def removed(self, event: Any) -> None:
        """Blocks left one of the places."""
        for block_hash in event.block_hashes if not event.group_idx else ():
            name = self._names.get(block_hash)
            if name is None:
                continue
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name], self._names[block_hash]

    def cleared(self) -> None:
        """Nothing is known any more."""
        self._names.clear()
        self._held.clear()

    def coming(self, prompt: Sequence[int], change: int) -> None:
        """A request with this prompt is under way (1), or has ended (-1): its blocks count as there meanwhile."""
        if self.block_size:
            self._coming.update(dict.fromkeys(names(prompt, self.block_size), change))
            self._coming += Counter()

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How much of the front of a prompt the engine need not compute."""
        blocks = 0
        for name in names(prompt, self.block_size) if self.block_size else ():
            if not (self._held[name] or self._coming[name]):
                break
            blocks += 1
        return blocks * self.block_size
