"""Keys of a 32k-token prompt: 128 chunks of 256 tokens, blocks of 16."""

import hashlib
import random
from array import array
from collections.abc import Callable

from kvcore.api import KeyGenerator, KeySource
from kvcore.plugins import PluginSpec, Registry
from kvcore_bench.speed.measure import Case, measure, us_each
from kvcore_bench.speed.rows import Row
from kvcore_bench.speed.setting import Setting

CHUNKS, CHUNK_TOKENS, BLOCK_TOKENS = 128, 256, 16
_CALLS = 8


def run(setting: Setting) -> list[Row]:
    """The rows `keys.*`, in us per chunk."""
    registry = Registry()
    tokens_keys = registry.create("keys", PluginSpec("tokens", {}, "bench"))
    engine_keys = registry.create("keys", PluginSpec("engine", {}, "bench"))
    rng = random.Random(1)  # noqa: S311 - test data
    tokens = [rng.randrange(150_000) for _ in range(CHUNKS * CHUNK_TOKENS)]
    ids = array("I", tokens)
    blocks = [rng.randbytes(32) for _ in range(CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS)]
    each = CHUNKS * _CALLS
    step = CHUNK_TOKENS // BLOCK_TOKENS

    def ours(generator: KeyGenerator, source: KeySource) -> Callable[[], None]:
        def call() -> None:
            for _ in range(_CALLS):
                if len(generator.extend(source)) != CHUNKS:
                    raise AssertionError("wrong number of keys")

        return call

    def sha(data: "array[int]") -> list[bytes]:
        whole, nbytes = memoryview(data).cast("B"), CHUNK_TOKENS * data.itemsize
        return [hashlib.sha256(whole[i : i + nbytes]).digest() for i in range(0, len(whole), nbytes)]

    def of_buffer() -> None:
        for _ in range(_CALLS):
            sha(ids)

    def of_list() -> None:
        for _ in range(_CALLS):
            fresh = array("I")
            fresh.fromlist(tokens)
            sha(fresh)

    def of_blocks() -> None:
        for _ in range(_CALLS):
            list(blocks[step - 1 :: step])

    buffer = KeySource(CHUNK_TOKENS, BLOCK_TOKENS, tokens=memoryview(ids))
    listed = KeySource(CHUNK_TOKENS, BLOCK_TOKENS, tokens=tokens)
    hashed = KeySource(CHUNK_TOKENS, BLOCK_TOKENS, block_hashes=blocks)
    with setting.peer("keys", chunks=CHUNKS, chunk_tokens=CHUNK_TOKENS, tokens=tokens) as peer:
        cases = [
            Case(name, "us", us_each(ours(keys, source), each), us_each(limit, each), peer.sampler(name))
            for name, keys, source, limit in (
                ("keys.tokens_buffer", tokens_keys, buffer, of_buffer),
                ("keys.tokens_list", tokens_keys, listed, of_list),
                ("keys.engine", engine_keys, hashed, of_blocks),
            )
        ]
        return measure(cases, setting.rounds)
