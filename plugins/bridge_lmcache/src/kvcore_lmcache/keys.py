"""LMCache's object keys as ours: what they say about the model goes into the namespace, the rest into the hash."""

from hashlib import blake2b
from typing import Any

from kvcore.engine import GroupSpec, ModelSpec
from kvcore_lmcache._compat import Layout

SCHEME = "lmcache-chunk/1"
"""The name of this key scheme: part of the namespace. A change below is another scheme."""

HASH_BYTES = 32


def spec_of(model: str, group: int, layout: Layout, weights: str) -> ModelSpec:
    """The model that objects of this layout belong to.

    One object of LMCache is one chunk of one rank: a block of ours. How many tokens it holds is in its shapes.

    Args:
        group: LMCache's `object_group_id`.
        weights: see `LMCacheConfig.weights`.
    """
    names = tuple(f"tensor.{i}" for i in range(len(layout.sizes)))
    return ModelSpec(
        engine="lmcache",
        model=model,
        weights=weights,
        dtype="+".join(layout.dtypes),
        element_bytes=layout.item_bytes,
        layout=";".join("x".join(map(str, shape)) for shape in layout.shapes),
        backend="",
        isa="",
        block_tokens=1,
        ranks=1,
        groups=(GroupSpec(names, layout.sizes),),
        extra={"object_group": str(group)},
    )


def hash_of(key: Any) -> bytes:
    """What distinguishes objects of one model: the chunk's hash (which covers the tokens before it), the rank and the
    size of its world, and the salt that keeps users apart."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kvcore.lmcache/1")
    for field in (key.chunk_hash, str(key.kv_rank).encode(), key.cache_salt.encode(errors="surrogatepass")):
        digest.update(len(field).to_bytes(4, "little") + field)
    return digest.digest()
