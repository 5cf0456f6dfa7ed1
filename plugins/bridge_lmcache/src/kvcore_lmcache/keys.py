"""LMCache's object keys as ours: what they say about the model goes into the namespace, the rest into the hash."""

from typing import Any

from kvcore.engine import GroupSpec, ModelSpec
from kvcore_lmcache._compat import Layout
from kvcore_lmcache.prompts import SCHEME, name_of

__all__ = ["SCHEME", "hash_of", "spec_of"]


def spec_of(model: str, group: int, layout: Layout, weights: str, ranks: int, algorithm: str) -> ModelSpec:
    """The model that objects of this layout belong to.

    One object of LMCache is one chunk of one rank: a block of ours.

    Args:
        group: LMCache's `object_group_id`.
        weights: see `LMCacheConfig.weights`.
        ranks: how many the engine has.
        algorithm: by which LMCache hashes tokens.
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
        block_tokens=layout.tokens,
        ranks=1,
        groups=(GroupSpec(names, layout.sizes),),
        extra={"object_group": str(group), "ranks": str(ranks), "hash": algorithm},
    )


def hash_of(key: Any) -> bytes:
    """The name of an object of LMCache."""
    return name_of(key.chunk_hash, key.kv_rank, key.cache_salt)
