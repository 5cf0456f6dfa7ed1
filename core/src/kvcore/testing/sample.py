"""A real KV object, for measuring serdes: random bytes do not compress as KV does."""

import functools
import lzma
from importlib import resources

from kvcore.api import ObjectLayout

SAMPLE = "kv_sample.bin.xz"
LAYOUT = ObjectLayout(blocks=1, ranks=1, layer_block_bytes=(98_304,) * 30, dtype="bfloat16", element_bytes=2)


@functools.cache
def kv_sample() -> tuple[bytes, ObjectLayout]:
    """The payload of one real object (2,949,120 bytes) and its layout.

    The KV of 128 tokens of the Apache licence's text in SmolLM2-135M: 30 layers, each one block of 3 KV heads,
    bfloat16, arranged as vLLM's CPU backend does: per head K transposed, `[64, 128]`, then V, `[128, 64]`.
    `benchmarks/make_kv_sample.py` made it.
    """
    data = lzma.decompress(resources.files(__package__).joinpath("data", SAMPLE).read_bytes())
    return data, LAYOUT
