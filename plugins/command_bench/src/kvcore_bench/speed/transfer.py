"""Between paged KV and L1, on one thread: 32 layers, K and V of 8 heads x 128 in bfloat16, scattered blocks."""

import random
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from kvcore.api import ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer.plan import Copy
from kvcore_bench.speed.machine import available_bytes
from kvcore_bench.speed.measure import Case, absent, measure, rate
from kvcore_bench.speed.rows import Row, Unit
from kvcore_bench.speed.setting import Setting

LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 2  # of one layer
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
OBJECT_BYTES = LAYERS * CHUNK_BLOCKS * BLOCK_BYTES
_SPARE_BLOCKS = 8

NAMES: tuple[tuple[str, Unit], ...] = (
    ("transfer.store", "GB/s"),
    ("transfer.load", "GB/s"),
    ("transfer.store_split", "GB/s"),
    ("transfer.load_split", "GB/s"),
)


def run(setting: Setting) -> list[Row]:
    """The rows `transfer.*`. `_split` is the layout that keeps all K before all V, so that a block is two pieces."""
    if find_spec("torch") is None:
        return absent(NAMES, "torch is not installed (the engine brings it, or kvcore[torch])")
    import torch

    chunks = min(6 if setting.quick else 24, available_bytes() // (8 * OBJECT_BYTES))
    if chunks < 1:
        return absent(NAMES, "too little memory is available")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # The layouts one after the other, to need no more memory than one of them.
        return [row for split in (False, True) for row in _measure(torch, setting, chunks, split)]
    finally:
        torch.set_num_threads(threads)


def _measure(torch: Any, setting: Setting, chunks: int, split: bool) -> list[Row]:
    geometry = {
        "layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE, "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS, "chunks": chunks, "split": split,
    }  # fmt: skip
    nbytes = chunks * OBJECT_BYTES
    suffix = "_split" if split else ""
    with setting.peer("transfer", **geometry) as peer, closing(_Paged(torch, chunks, split)) as paged:
        plain = plain_copy(torch, nbytes)
        cases = [
            Case(
                f"transfer.{way}{suffix}",
                "GB/s",
                rate(move, nbytes, repeats=2),
                rate(plain, nbytes, repeats=2),
                peer.sampler(f"transfer.{way}"),
            )
            for way, move in (("store", paged.store), ("load", paged.load))
        ]
        rows = measure(cases, 4 if setting.quick else 7)
        paged.check()
    return rows


class TwoSides:
    """An engine's paged KV twice: one to store from, one to load into; and scattered block ids of so many chunks."""

    def __init__(self, torch: Any, chunks: int, *, split: bool) -> None:
        self._torch = torch
        blocks = chunks * CHUNK_BLOCKS
        self.source = _layers(torch, blocks + _SPARE_BLOCKS, split, fill=True)
        self.target = _layers(torch, blocks + _SPARE_BLOCKS, split, fill=False)
        self.ids = list(range(blocks))
        random.Random(1).shuffle(self.ids)  # noqa: S311 - scattered, as in a busy engine

    def check(self) -> None:
        """What went through must be what came."""
        for source, target in zip(self.source, self.target, strict=True):
            if not self._torch.equal(source[self.ids], target[self.ids]):
                raise AssertionError("loaded KV differs from stored KV")


class _Paged:
    """Both sides and an arena between."""

    def __init__(self, torch: Any, chunks: int, split: bool) -> None:
        from kvcore.transfer import PagedCache

        layout = ObjectLayout(CHUNK_BLOCKS, 1, (BLOCK_BYTES,) * LAYERS, "bfloat16", 2)
        self._kv = TwoSides(torch, chunks, split=split)
        ids = self._kv.ids
        self._arena = Arena(chunks * OBJECT_BYTES)
        self._copies = [
            Copy(0, i * OBJECT_BYTES, self._arena.generation(i * OBJECT_BYTES), 0, tuple(ids[at : at + CHUNK_BLOCKS]))
            for i, at in enumerate(range(0, len(ids), CHUNK_BLOCKS))
        ]
        self._from = PagedCache([self._kv.source], [layout], 0, self._arena)
        self._into = PagedCache([self._kv.target], [layout], 0, self._arena)

    def store(self) -> None:
        self._from.store(self._copies)

    def load(self) -> None:
        if self._into.load(self._copies):
            raise AssertionError("a load failed")

    def check(self) -> None:
        self._kv.check()

    def close(self) -> None:
        del self._from, self._into
        self._arena.close()


def _layers(torch: Any, blocks: int, split: bool, *, fill: bool) -> list[Any]:
    shape = (blocks, BLOCK_TOKENS, HEADS, HEAD_SIZE)
    layers = []
    for _ in range(LAYERS):
        whole = torch.zeros((2, *shape) if split else (blocks, 2, *shape[1:]), dtype=torch.bfloat16)
        if fill:
            whole.view(torch.int16).random_(0, 1000)
        layers.append(whole.transpose(0, 1) if split else whole)
    return layers


def plain_copy(torch: Any, nbytes: int) -> Callable[[], object]:
    """The limit: as many bytes from one tensor to another."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)
