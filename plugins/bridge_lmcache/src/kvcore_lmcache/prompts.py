"""The keys of a prompt that LMCache has not been sent, for people who ask about it: its hashes, without LMCache."""

import importlib
import struct
from hashlib import blake2b

from kvcore.api import ConfigError, KeySource, Prompt

SCHEME = "lmcache-chunk/1"
"""The name of this key scheme: part of the namespace. A change of `name_of` is another scheme."""
HASH_BYTES = 32
ALGORITHM = "blake3"
"""LMCache's default, and the one whose hashes are the same in every process."""


def name_of(chunk_hash: bytes, kv_rank: int, salt: str) -> bytes:
    """What distinguishes objects of one model: the chunk's hash (which covers the tokens before it), the rank and the
    size of its world, and the salt that keeps users apart."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kvcore.lmcache/1")
    for field in (chunk_hash, str(kv_rank).encode(), salt.encode(errors="surrogatepass")):
        digest.update(len(field).to_bytes(4, "little") + field)
    return digest.digest()


def key_source(prompt: Prompt) -> KeySource:
    """The names of a prompt's chunks on the first rank. Raises `ConfigError` where they cannot be told."""
    if prompt.adapter:
        raise ConfigError("how LMCache names the chunks of a request with an adapter is not known here")
    if (algorithm := prompt.extra.get("hash", ALGORITHM)) != ALGORITHM:
        raise ConfigError(
            f"LMCache's server runs with --hash-algorithm {algorithm}: only the hashes of {ALGORITHM} are known here"
        )
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        raise ConfigError("LMCache's hashes are BLAKE3, which is not installed here: pip install blake3") from None
    size, ranks = prompt.block_tokens, int(prompt.extra.get("ranks", "1"))
    pack, rank = struct.Struct(f">{size}I").pack, ranks << 24 | ranks << 8
    parent, names = blake3(bytes(8) + bytes(4)).digest(), []  # of no chunk before, and the token 0
    for at in range(0, len(prompt.tokens) - size + 1, size):
        parent = blake3(parent + pack(*prompt.tokens[at : at + size])).digest()
        names.append(name_of(parent, rank, prompt.salt))
    return KeySource(prompt.chunk_tokens, size, prompt.tokens, names)
