"""The stream of a cache, read as routers read it."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from events_reader import Subscriber

from kvcore.api import Context, ObjectEvent, ObjectKey
from kvcore.engine import CacheEngine, GroupSpec, ModelSpec, Space, attach_arena
from kvcore_events.batches import REMEMBERED, Translator
from kvcore_events.config import EventsConfig
from kvcore_events.publisher import Publisher

BLOCK = 128 << 10
SPEC = ModelSpec(
    "test", "m", "w", "bfloat16", 2, "LBHNC", "CPU", "vec", 32, 1, (GroupSpec(("a",), (BLOCK,)),)
)  # fmt: skip
NAMESPACE = bytes(16)


def hashes(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count)]


def put(engine: CacheEngine, space: Space, keys: list[bytes], first: int = 0) -> None:
    plan = engine.reserve(space, keys, first, len(keys), [list(range(len(keys) * space.chunk_blocks))])
    view = attach_arena(engine.descriptor())
    view.close()
    engine.publish(plan.id)


def objects(keys: list[bytes], tier: str = "l1", parent: bytes | None = None) -> list[ObjectEvent]:
    return [ObjectEvent(ObjectKey(NAMESPACE, k), tier, 10, "", parent, 32) for k in keys]


@pytest.fixture
def publisher(endpoint: str) -> Any:
    made: list[Publisher] = []

    def make(**options: Any) -> Publisher:
        made.append(
            Publisher(EventsConfig(endpoint=endpoint, block_hashes="bytes", **options), logging.getLogger("kvcore"))
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def joined(publisher: Publisher, subscriber: Subscriber) -> None:
    """A subscription takes a moment, and PUB drops what comes before it."""
    probe = objects([b"probe" * 4])
    deadline = time.monotonic() + 15
    while not subscriber._socket.poll(20):
        assert time.monotonic() < deadline
        publisher.put("stored", probe)
    subscriber.until(lambda: bool(subscriber.seqs))
    while subscriber._socket.poll(200):
        subscriber.read()
    subscriber.held.clear()
    del subscriber.seqs[:-1], subscriber.events[:]


def test_what_a_router_knows_is_what_the_cache_holds(
    cache: Callable[..., CacheEngine],
    subscribe: Callable[..., Subscriber],
    endpoint: str,
    replay_endpoint: str,
    tmp_path: Path,
) -> None:
    subscriber = subscribe(endpoint, replay_endpoint=replay_endpoint)
    disk = f"[{{storage: {{plugin: disk, path: {tmp_path / 'disk'}, capacity: 6MiB, direct: 'off'}}}}]"
    engine = cache(disk)
    space = engine.register(SPEC)
    table = engine.object_space(space, 0).objects
    for i in range(5):
        put(engine, space, hashes(20, str(i)))
        engine.drain()
    subscriber.until(lambda: subscriber.of("l1") == set(table))
    (tier,) = engine.manager.tiers
    subscriber.until(lambda: subscriber.of("disk") == {e.key.chunk_hash for e in tier.storage.list()})
    assert subscriber.events[0] == {"type": "AllBlocksCleared"}
    assert subscriber.seqs == list(range(len(subscriber.seqs)))
    assert 30 < len(subscriber.of("disk")) < 50
    engine.close()
    subscriber.until(lambda: not +subscriber.held)
    assert subscriber.events[-1] == {"type": "AllBlocksCleared"}


def test_a_chain_is_one_event_with_its_sizes(
    cache: Callable[..., CacheEngine], subscribe: Callable[..., Subscriber], endpoint: str, replay_endpoint: str
) -> None:
    subscriber = subscribe(endpoint, "kv@me@m", replay_endpoint)
    engine = cache("[{storage: memory}]", topic="kv@me@m")
    space = engine.register(SPEC)
    keys = hashes(7)
    put(engine, space, keys[:3])
    put(engine, space, keys, first=3)
    engine.drain()
    subscriber.until(lambda: len(subscriber.of("memory")) == 7)
    one = {
        "type": "BlockStored",
        "token_ids": [],
        "block_size": space.chunk_tokens,
        "lora_id": None,
        "lora_name": None,
        "group_idx": 0,
        "nbytes": space.groups[0].nbytes,
        "namespace": space.namespace.hex(),
    }
    at_l1 = [e for e in subscriber.events if e.get("tier") == "l1"]
    assert at_l1 == [
        {**one, "block_hashes": keys[:3], "parent_block_hash": None, "medium": "CPU", "tier": "l1"},
        {**one, "block_hashes": keys[3:], "parent_block_hash": keys[2], "medium": "CPU", "tier": "l1"},
    ]
    for event in subscriber.events:
        if event.get("tier") == "memory":
            assert event == {
                **one,
                "block_hashes": event["block_hashes"],
                "parent_block_hash": event["parent_block_hash"],
                "medium": "STORAGE",
                "tier": "memory",
            }
            at = keys.index(event["block_hashes"][0])
            assert event["parent_block_hash"] == (keys[at - 1] if at else None)
    assert subscriber.topics == {b"kv@me@m"}


def test_who_missed_something_asks_for_it(
    publisher: Callable[..., Publisher], subscribe: Callable[..., Subscriber], endpoint: str, replay_endpoint: str
) -> None:
    stream = publisher(replay_endpoint=replay_endpoint)
    late = subscribe(endpoint)
    joined(stream, late)
    before = late.seqs[-1]
    for i in range(4):
        stream.put("stored", objects(hashes(1, str(i))))
        late.read()
    found = late.replay(replay_endpoint, before + 2)
    assert [seq for seq, _ in found] == [before + 2, before + 3, before + 4]
    assert [payload for _, payload in found] == late.payloads[-3:]
    everything = late.replay(replay_endpoint, 0)
    assert everything[0][0] == 0
    late.take(everything[0][1])
    assert late.events[-1] == {"type": "AllBlocksCleared"}
    assert late.replay(replay_endpoint, 1 << 40) == []


def test_what_is_kept_for_a_replay_is_bounded(
    publisher: Callable[..., Publisher], subscribe: Callable[..., Subscriber], endpoint: str, replay_endpoint: str
) -> None:
    stream = publisher(replay_endpoint=replay_endpoint, replay_size=1000)
    reader = subscribe(endpoint)
    joined(stream, reader)
    for i in range(20):
        stream.put("evicted", objects(hashes(1, str(i))))
        reader.read()
    found = reader.replay(replay_endpoint, 0)
    assert 0 < sum(len(payload) for _, payload in found) <= 1000
    assert found[-1][0] == reader.seqs[-1]


def test_a_full_queue_drops_and_the_numbers_show_it(
    publisher: Callable[..., Publisher], subscribe: Callable[..., Subscriber], endpoint: str, caplog: Any
) -> None:
    stream = publisher(queue_objects=10)
    reader = subscribe(endpoint)
    joined(stream, reader)
    before = reader.seqs[-1]
    with caplog.at_level(logging.WARNING, "kvcore"):
        stream.put("stored", objects(hashes(11)))
        stream.put("stored", objects(hashes(12)))
        stream.put("stored", objects(hashes(1, "fits")))
        reader.read()
        stream.put("stored", objects(hashes(1, "next")))
        reader.read()
    assert stream.dropped == 23
    assert reader.seqs[-1] - before == 2 + 2  # two batches came, two did not
    assert reader.of("l1") == {*hashes(1, "fits"), *hashes(1, "next")}
    assert [r.getMessage() for r in caplog.records] == ["events: more than 10 objects wait: some are not told"]


def test_many_threads_at_once_and_a_close_in_their_midst(
    publisher: Callable[..., Publisher], subscribe: Callable[..., Subscriber], endpoint: str
) -> None:
    stream = publisher()
    reader = subscribe(endpoint)
    joined(stream, reader)

    def work(name: str) -> None:
        for i in range(200):
            stream.put("stored", objects(hashes(1, f"{name}{i}")))

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.close()
    stream.put("stored", objects(hashes(1)))
    reader.until(lambda: bool(reader.events) and reader.events[-1] == {"type": "AllBlocksCleared"})
    told = [h for e in reader.events if e["type"] == "BlockStored" for h in e["block_hashes"]]
    assert len(told) == len(set(told)) == 800
    assert reader.seqs == list(range(reader.seqs[0], reader.seqs[0] + len(reader.seqs)))


def test_an_endpoint_that_is_taken_costs_the_stream_and_nothing_else(
    cache: Callable[..., CacheEngine], publisher: Callable[..., Publisher], caplog: Any
) -> None:
    publisher()
    with caplog.at_level(logging.ERROR, "kvcore"):
        engine = cache()
    assert "NOTHING IS PUBLISHED" in caplog.text
    assert "routers do not learn what this cache holds, until it is started again" in caplog.text
    space = engine.register(SPEC)
    put(engine, space, hashes(3))
    assert len(engine.object_space(space, 0).objects) == 3


def test_an_endpoint_that_is_none_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(ValueError, match="is no endpoint: write one such as"):
        EventsConfig(endpoint="localhost:5557")
    with pytest.raises(ValueError, match=r"are both tcp://127\.0\.0\.1:5557: give each a port of its own"):
        EventsConfig(replay_endpoint="tcp://127.0.0.1:5557")
    EventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")  # two free ports


def test_what_is_remembered_for_tiers_is_bounded() -> None:
    translator = Translator(whole=True)
    for i in range(REMEMBERED + 5):
        translator.events("stored", objects([i.to_bytes(16, "big")], parent=b""))
    assert len(translator._places) == REMEMBERED
    (old,) = translator.events("stored", [ObjectEvent(ObjectKey(NAMESPACE, (3).to_bytes(16, "big")), "disk", 1)])
    (new,) = translator.events("stored", [ObjectEvent(ObjectKey(NAMESPACE, (300).to_bytes(16, "big")), "disk", 1)])
    assert (old.block_size, new.block_size) == (0, 32)


def test_models_whose_chunks_have_one_hash_are_told_apart() -> None:
    """Engines hash tokens: with another chunk size, the same hash ends a chunk that began elsewhere."""
    first, second = hashes(2)
    short, long = ObjectKey(NAMESPACE, second), ObjectKey(b"m" * 16, second)
    translator = Translator(whole=True)
    translator.events("stored", [ObjectEvent(short, "l1", 10, parent=first, tokens=32)])
    translator.events("stored", [ObjectEvent(long, "l1", 20, parent=b"", tokens=64)])
    events = translator.events("stored", [ObjectEvent(short, "disk", 10), ObjectEvent(long, "disk", 20)])
    assert [(e.parent_block_hash, e.block_size) for e in events] == [(first, 32), (None, 64)]


def test_removals_are_one_event_for_each_kind() -> None:
    keys = hashes(4)
    gone = [*objects(keys[:2]), *objects(keys[2:], tier="disk"), *objects(keys[2:])]
    first, second = Translator(whole=True).events("evicted", gone)
    assert (first.tier, first.medium, first.block_hashes) == ("l1", "CPU", keys)
    assert (second.tier, second.medium, second.block_hashes) == ("disk", "STORAGE", keys[2:])


def test_it_is_made_from_the_configuration_and_binds_only_when_a_cache_opens(endpoint: str) -> None:
    from kvcore_events.observer import EventsObserver

    observer = EventsObserver(EventsConfig(endpoint=endpoint), Context())
    observer.kvcore_stored(objects(hashes(1)))  # before it opens
    first, second = EventsObserver(EventsConfig(endpoint=endpoint), Context()), observer
    first.kvcore_opened("a")
    first.kvcore_closed("a")
    second.kvcore_opened("b")
    assert second._publisher is not None
    second.kvcore_closed("b")


def test_hashes_are_numbers_unless_asked_otherwise() -> None:
    first, second = objects([bytes(24) + b"\0\0\0\0\0\0\1\2", b"\xff" * 16])
    (event,) = Translator().events("stored", [first, second._replace(parent=first.key.chunk_hash)])
    assert event.block_hashes == [258, 2**64 - 1]
    (event,) = Translator().events("evicted", [first])
    assert event.block_hashes == [258]
