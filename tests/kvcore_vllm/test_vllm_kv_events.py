"""What vLLM's event stream is told of kvcore's objects."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.api import ObjectEvent, ObjectKey

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 16, 64
NAMESPACE = bytes(16)


@pytest.fixture
def events() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvcore_vllm.events import KVEvents

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVEvents(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]), BLOCK, BLOCK)


def state(chunks: int, seed: str = "") -> Any:
    """A request of so many chunks, as the scheduler's half remembers it."""
    blocks = chunks * CHUNK // BLOCK
    request = SimpleNamespace(
        block_hashes=[hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(blocks)],
        all_token_ids=list(range(chunks * CHUNK)),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
    )
    space = SimpleNamespace(namespace=NAMESPACE, chunk_blocks=CHUNK // BLOCK, chunk_tokens=CHUNK, windows=(None,))
    return SimpleNamespace(request=request, space=space, hashes=request.block_hashes[CHUNK // BLOCK - 1 :: 4])


def of(request: Any, *chunks: int, tier: str = "l1") -> list[ObjectEvent]:
    return [ObjectEvent(ObjectKey(NAMESPACE, request.hashes[i]), tier, 1) for i in chunks]


def numbers(request: Any, first: int, last: int) -> list[int]:
    """The blocks of these chunks, as vLLM publishes them."""
    return [int.from_bytes(h[-8:], "big") for h in request.request.block_hashes[first * 4 : last * 4]]


def test_a_chunk_is_told_block_by_block_with_its_tokens(events: Any) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    request = state(4)
    events.describe(request, 1, 4)
    events.stored(of(request, 1, 2))
    events.stored(of(request, 3))
    events.evicted(of(request, 2, 3))
    assert events.take() == [
        BlockStored(
            block_hashes=numbers(request, 1, 4),
            parent_block_hash=numbers(request, 0, 1)[-1],
            token_ids=list(range(64, 256)),
            block_size=BLOCK,
            lora_id=None,
            medium="CPU",
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockRemoved(block_hashes=numbers(request, 2, 4), medium="CPU", group_idx=0),
    ]
    assert events.take() == []


def test_each_tier_is_told_by_itself_and_once(events: Any) -> None:
    request = state(1)
    events.describe(request, 0, 1)
    for _ in range(2):
        events.stored(of(request, 0))
        events.stored(of(request, 0, tier="disk"))
    assert [(e.medium, e.parent_block_hash) for e in events.take()] == [("CPU", None), ("STORAGE", None)]
    events.evicted(of(request, 0))
    events.evicted(of(request, 0))
    assert [(type(e).__name__, e.medium) for e in events.take()] == [("BlockRemoved", "CPU")]


def test_what_no_request_has_shown_is_not_told(events: Any) -> None:
    request = state(2)
    events.stored(of(request, 0, 1))
    events.evicted(of(request, 0))
    assert events.take() == []
    events.found(request, 0, 2)  # it hits what was there before
    (event,) = events.take()
    assert event.block_hashes == numbers(request, 0, 2)


def test_what_is_forgotten_is_taken_back(events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.events.MAX_TOKENS", 3 * CHUNK)
    old, new = state(2, "old"), state(2, "new")
    for request in (old, new):
        events.describe(request, 0, 2)
        events.stored(of(request, 0, 1))
    events.describe(old, 1, 2)
    told: dict[str, set[int]] = {"BlockStored": set(), "BlockRemoved": set()}
    for event in events.take():
        told[type(event).__name__] |= set(event.block_hashes)
    assert told["BlockStored"] - told["BlockRemoved"] == {*numbers(old, 1, 2), *numbers(new, 0, 2)}
    events.clear()
    (event,) = events.take()
    assert len(event.block_hashes) == 12
    assert events._tokens == 0


def test_too_much_news_is_bounded_and_leaves_nothing_stale(events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_vllm.events.MAX_WAITING", 3)
    request = state(8)
    events.describe(request, 0, 8)
    for i in range(8):
        events.stored(of(request, i))
    assert len(events._heard) == 4
    (event,) = events.take()
    assert event.block_hashes == numbers(request, 4, 8)
    events.evicted(of(request, 7))
    events.lost()
    events.stored(of(request, 0))
    taken_back, new = events.take()
    assert taken_back.block_hashes == numbers(request, 4, 8)
    assert new.block_hashes == numbers(request, 0, 1)
    events.found(request, 0, 2)
    (event,) = events.take()
    assert event.block_hashes == numbers(request, 1, 2)
