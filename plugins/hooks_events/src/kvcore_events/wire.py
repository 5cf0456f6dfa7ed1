"""What is on the wire: vLLM's KV events, and what kvcore says in addition.

A message has three frames: the topic, a sequence number (8 bytes, big-endian), and an `EventBatch` in msgpack. Names,
tags and layout are those of `vllm.distributed.kv_events`: a batch is an array, an event a map with its `type`. Readers
look fields up by name, so the fields of our own, which stand last, pass by those that do not know them.
"""

import msgspec

Hash = bytes | int
MEDIUM_L1 = "CPU"
MEDIUM_TIER = "STORAGE"
"""vLLM's words for host memory and for what lies behind it. Routers take only words they know."""
END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """The base of all events."""


class BlockStored(Event):
    """Objects of one tier and size, each the chunk after the one before it."""

    block_hashes: list[Hash]
    """Chunk hashes: with `keys: engine`, each the engine's own hash of the chunk's last block."""
    parent_block_hash: Hash | None
    """The chunk before the first of them; None: there is none, or it is not known."""
    token_ids: list[int]
    """Empty: a cache does not learn them. Who knows a hash from the engine's own events knows its tokens."""
    block_size: int
    """Tokens per chunk; 0 where not known."""
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int
    tier: str
    """`l1`, or the name of the tier."""
    nbytes: int
    """Bytes of each object: its payload, or in a tier what the tier was given."""
    namespace: str
    """What the objects are not mixed across (model, weights, layout, tenant, ...), as hex."""


class BlockRemoved(Event):
    """Objects that are not in the tier any more."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int
    tier: str
    reason: str
    """See `kvcore_evicted`."""
    namespace: str


class AllBlocksCleared(Event):
    """Nothing that was told before is there: the first event of a cache that opens, the last of one that closes."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The third frame. `ts`: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def short(chunk_hash: bytes) -> int:
    """A hash as vLLM publishes it unless told otherwise: its last 64 bits."""
    return int.from_bytes(chunk_hash[-8:], "big")


def medium_of(tier: str) -> str:
    """The medium that stands for a tier."""
    return MEDIUM_L1 if tier == "l1" else MEDIUM_TIER
