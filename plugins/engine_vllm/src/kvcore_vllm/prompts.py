"""The keys of a prompt that vLLM has not been sent, for people who ask about it: vLLM's block hashes, without vLLM."""

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from kvcore.api import ConfigError, KeySource, Prompt

Hash = Callable[[Any], bytes]
TIER_KEYS = "vllm-tier/1"
"""The key scheme of a tier: vLLM's block hashes, of chunks of its offloading."""
_FIXED_SEED = "vllm-none-hash"
"""What vLLM derives the first block's parent from, where PYTHONHASHSEED is not set and the hash is cryptographic."""


def key_source(prompt: Prompt) -> KeySource:
    """What the connector would give the key generator for this prompt, or with `TIER_KEYS` what vLLM would ask a tier
    for. Raises `ConfigError` where nobody can tell."""
    first, every = _extra_keys(prompt)
    chunks = range(len(prompt.tokens) // prompt.chunk_tokens)
    keys = {i: (*every, *first) if i == 0 else every for i in chunks}
    return KeySource(
        chunk_tokens=prompt.chunk_tokens,
        block_tokens=prompt.block_tokens,
        tokens=prompt.tokens,
        block_hashes=_block_hashes(prompt, first, every),
        chunk_extra={i: repr(k).encode() for i, k in keys.items() if k},
    )


def _extra_keys(prompt: Prompt) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the first block's hash depends on beside the tokens, and what every block's does."""
    every: tuple[Any, ...] = ()
    if prompt.adapter:
        name, _, path = prompt.adapter.partition("=")
        if not path:
            raise ConfigError(f"the adapter is {prompt.adapter!r}: write NAME=PATH, as for vLLM's --lora-modules")
        every = (("lora", name, path),)
    return ((("cache_salt", prompt.salt),) if prompt.salt else ()), every


def _block_hashes(prompt: Prompt, first: tuple[Any, ...], every: tuple[Any, ...]) -> list[bytes]:
    algorithm = prompt.extra.get("hash", "sha256")
    function, size = _function(algorithm), int(prompt.extra.get("tokens_per_hash", prompt.block_tokens))
    parent = _root(algorithm, function)
    hashes = []
    for begin in range(0, len(prompt.tokens) - size + 1, size):
        extra = (*every, *first) if begin == 0 else every
        parent = function((parent, tuple(prompt.tokens[begin : begin + size]), extra or None))
        hashes.append(parent)
    each = prompt.block_tokens // size
    return hashes[each - 1 :: each]


def _root(algorithm: str, function: Hash) -> bytes:
    """The parent of the first block: of the vLLM in this process, or as another has it."""
    loaded = sys.modules.get("vllm.v1.core.kv_cache_utils")
    if (known := getattr(loaded, "NONE_HASH", None)) is not None:
        return bytes(known)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        raise ConfigError(
            f"vLLM's prefix hash is {algorithm}, whose seed is another in every process: ask the engine's own cache, "
            "or start both with the same PYTHONHASHSEED"
        )
    return function(_FIXED_SEED if seed is None else seed)


def _function(algorithm: str) -> Hash:
    name, _, form = algorithm.partition("_")
    if name not in ("sha256", "xxhash") or form not in ("", "cbor"):
        raise ConfigError(f"vLLM's prefix hash {algorithm!r} is not known here: explain a request by its id")
    if form == "cbor":
        try:
            from cbor2 import dumps as cbor
        except ImportError:
            raise ConfigError(f"vLLM's prefix hash {algorithm!r} needs cbor2 here: pip install cbor2") from None

        def raw(value: Any) -> bytes:
            return cbor(value, canonical=True)
    else:

        def raw(value: Any) -> bytes:
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    if name == "sha256":
        return lambda value: hashlib.sha256(raw(value)).digest()
    from xxhash import xxh3_128_digest

    return lambda value: xxh3_128_digest(raw(value))
