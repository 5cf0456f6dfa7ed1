"""The stream, read by vLLM's own decoder."""

import hashlib
from collections.abc import Callable

import msgspec
import pytest
from events_reader import Subscriber

from kvcore.engine import CacheEngine, GroupSpec, ModelSpec
from kvcore_events import wire

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # importing vLLM warns


def test_vllms_decoder_reads_every_batch(
    cache: Callable[..., CacheEngine], subscribe: Callable[..., Subscriber], endpoint: str, replay_endpoint: str
) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    reader = subscribe(endpoint, replay_endpoint=replay_endpoint)
    engine = cache(block_hashes="int")
    space = engine.register(
        ModelSpec("test", "m", "w", "f16", 2, "L", "B", "", 32, 1, (GroupSpec(("a",), (128 << 10,)),))
    )
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
    plan = engine.reserve(space, keys, 0, 4, [list(range(4))])
    engine.publish(plan.id)
    engine.clear(space)
    reader.until(lambda: any(e["type"] == "BlockRemoved" for e in reader.events))
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    batches = [decoder.decode(payload) for payload in reader.payloads]
    assert {batch.data_parallel_rank for batch in batches} == {0}
    cleared, stored, removed = (event for batch in batches for event in batch.events)
    assert cleared == AllBlocksCleared()
    numbers = [maybe_convert_block_hash(key) for key in keys]
    assert stored == BlockStored(
        block_hashes=numbers,
        parent_block_hash=None,
        token_ids=[],
        block_size=32,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
    )
    assert removed == BlockRemoved(block_hashes=numbers, medium="CPU", group_idx=0)


def test_our_names_and_layout_are_vllms() -> None:
    from vllm.distributed import kv_events

    for ours, theirs in (
        (wire.EventBatch, kv_events.EventBatch),
        (wire.BlockStored, kv_events.BlockStored),
        (wire.BlockRemoved, kv_events.BlockRemoved),
        (wire.AllBlocksCleared, kv_events.AllBlocksCleared),
    ):
        mine, yours = ours.__struct_config__, theirs.__struct_config__
        assert (mine.array_like, mine.tag, mine.tag_field) == (yours.array_like, yours.tag, yours.tag_field)
        required = {f.name for f in msgspec.structs.fields(theirs) if f.required}
        assert required <= set(ours.__struct_fields__)
    assert (wire.MEDIUM_L1, wire.MEDIUM_TIER) == (kv_events.MEDIUM_CPU, kv_events.MEDIUM_STORAGE)
    assert wire.END_SEQ == kv_events.ZmqEventPublisher.END_SEQ
