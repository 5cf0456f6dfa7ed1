"""The keys of a prompt that SGLang has not been sent, for people who ask about it: its page hashes, without SGLang."""

import hashlib
import struct
from collections.abc import Mapping
from uuid import NAMESPACE_URL, uuid5

from kvcore.api import ConfigError, KeySource, Prompt

KEYS = "sglang-page/1"
"""SGLang's page hashes: SHA-256 over the previous page's and the page's token ids as little-endian u32, from a seed of
adapter and salt."""
_POOL = "kv"


def key_source(prompt: Prompt) -> KeySource:
    """The prompt's page hashes. Raises `ConfigError` where they cannot be told."""
    _of_plain_pages(prompt.extra)
    size = prompt.block_tokens
    pack = struct.Struct(f"<{size}I").pack
    parent, hashes = _seed(_adapter_id(prompt.adapter), prompt.salt or None), []
    for at in range(0, len(prompt.tokens) - size + 1, size):
        parent = hashlib.sha256(parent + pack(*prompt.tokens[at : at + size])).digest()
        hashes.append(parent)
    return KeySource(prompt.chunk_tokens, size, prompt.tokens, hashes)


def _of_plain_pages(extra: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a pool whose pages are not those of KV, or whose hashes are not of single tokens."""
    if extra.get("pool", _POOL) != _POOL:
        raise ConfigError(f"SGLang's pool {extra['pool']} holds what it keeps beside KV: only KV is looked for")
    if (speculative := extra.get("speculative_algorithm", "None")) != "None":
        raise ConfigError(
            f"SGLang runs with --speculative-algorithm {speculative}, where its page hashes may be of pairs of tokens: "
            "which, is not known here; explain a lookup that was made"
        )


def _adapter_id(adapter: str) -> str | None:
    """What SGLang calls an adapter of `--lora-paths` in its keys."""
    if not adapter:
        return None
    name, _, path = adapter.partition("=")
    if not path:
        raise ConfigError(f"the adapter is {adapter!r}: write NAME=PATH, as for SGLang's --lora-paths")
    return uuid5(NAMESPACE_URL, f"{name}\0{path}").hex


def _seed(extra_key: str | None, salt: str | None) -> bytes:
    """What stands for the page before the first."""
    if extra_key is None and salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, salt):
        if part is None:
            digest.update(b"\0")
        else:
            raw = part.encode(errors="surrogatepass")
            digest.update(b"\1" + len(raw).to_bytes(8, "little") + raw)
    return digest.digest()
