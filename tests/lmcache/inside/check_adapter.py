"""kvcore's adapter on LMCache's own objects. Runs under LMCache's Python, started by `test_lmcache_adapter.py`."""

import dataclasses
import importlib
import logging
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvcore.api import ConfigError
from kvcore_lmcache import _compat
from kvcore_lmcache.adapter import STORE_THREADS

PATIENCE_S = 300.0
SHAPE = torch.Size((2, 4, 64, 96))
DTYPE = torch.bfloat16
RANK = ObjectKey.ComputeKVRank(2, 1, 2, 1)

Adapter = Any
Make = Callable[..., Adapter]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Adapters by LMCache's plugin mechanism, over one tier."""
    made: list[Adapter] = []

    def make(storage: str, timeout: str = "60s", **params: Any) -> Adapter:
        config = tmp_path / f"kvcore-{len(made)}.yaml"
        config.write_text(f"lookup_timeout: 20s\nl2:\n- storage: {storage}\n  timeout: {timeout}\n")
        adapter = create(config=str(config), **params)
        made.append(adapter)
        return adapter

    yield make
    for adapter in made:
        adapter.close()


def create(**params: Any) -> Adapter:
    spec = {"module_path": "kvcore_lmcache.adapter", "class_name": "KVCoreL2Adapter", "adapter_params": params}
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict({"type": "plugin", **spec}))
    adapter.set_backend_identity("plugin")
    return adapter


def key(number: int, **other: Any) -> ObjectKey:
    plain = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "some/model", "kv_rank": RANK}
    return ObjectKey(**{**plain, **other})


def memory(seed: int | None, shapes: tuple[torch.Size, ...] = (SHAPE,), dtype: torch.dtype = DTYPE) -> TensorMemoryObj:
    """An object of LMCache's with random bytes (zeros without a seed), in memory that is longer than it."""
    nbytes = sum(shape.numel() * dtype.itemsize for shape in shapes)
    raw = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    if seed is not None:
        raw[:nbytes] = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    meta = MemoryObjMetadata(
        shapes[0],
        dtype,
        0,
        nbytes + 4096,
        1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=list(shapes),
        dtypes=[dtype] * len(shapes),
    )
    return TensorMemoryObj(raw, meta, None)


def layouts(*shapes: torch.Size, dtype: torch.dtype = DTYPE) -> dict[int, MemoryLayoutDesc]:
    return {0: MemoryLayoutDesc(list(shapes or (SHAPE,)), [dtype] * len(shapes or (SHAPE,)))}


def answer(fd: int, ask: Callable[[], Any]) -> Any:
    """As LMCache's loops: wait for the event, consume it, ask."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := ask()):
        assert time.monotonic() < give_up, "no answer"
        if select.select([fd], [], [], PATIENCE_S)[0]:
            consume_fd(fd)
    return found


def store(adapter: Adapter, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    results = answer(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert list(results) == [task]
    return results[task]


def lookup(adapter: Adapter, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc] | None = None) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, layouts() if descs is None else descs)
    ask = lambda: adapter.query_lookup_and_lock_result(task)  # noqa: E731
    bits = answer(adapter.get_lookup_and_lock_event_fd(), lambda: (b,) if (b := ask()) is not None else None)[0]
    adapter.submit_unlock(keys)
    return [bits.test(i) for i in range(len(keys))]


def load(adapter: Adapter, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    ask = lambda: adapter.query_load_result(task)  # noqa: E731
    bits = answer(adapter.get_load_event_fd(), lambda: (b,) if (b := ask()) is not None else None)[0]
    return [bits.test(i) for i in range(len(keys))]


def payload(obj: TensorMemoryObj) -> bytes:
    return bytes(obj.byte_array)


@pytest.mark.parametrize("name", _compat.NEEDED)
def check_lmcache_has(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        assert hasattr(found, part), f"this LMCache has no {name}"
        found = getattr(found, part)


def check_the_key_has_no_field_that_is_not_hashed() -> None:
    known = {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"}
    assert {field.name for field in dataclasses.fields(ObjectKey)} == known


def check_the_tested_version_is_installed() -> None:
    assert _compat.installed_lmcache() == _compat.TESTED


def check_round_trip(make: Make) -> None:
    adapter = make("memory")
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    keys, objects = [key(i) for i in range(6)], [memory(i) for i in range(6)]
    assert lookup(adapter, keys) == [False] * 6
    result = store(adapter, keys[:5], objects[:5])
    assert result.is_successful()
    assert result.bytes_transferred() == 5 * objects[0].get_size()
    assert lookup(adapter, keys) == [True] * 5 + [False]
    into = [memory(None) for _ in keys]
    assert load(adapter, keys, into) == [True] * 5 + [False]
    assert [payload(o) for o in into[:5]] == [payload(o) for o in objects[:5]]
    assert not into[0].raw_data[objects[0].get_size() :].any()  # nothing beyond the object


def check_keys_are_kept_apart(make: Make) -> None:
    """By salt, rank, model, object group, and by layout."""
    adapter = make("memory")
    others = [key(1), key(1, cache_salt="alice"), key(1, kv_rank=7), key(1, model_name="other")]
    descs = {**layouts(), 1: layouts()[0]}
    others.append(key(1, object_group_id=1))
    for number, one in enumerate(others):
        assert lookup(adapter, others, descs) == [i < number for i in range(5)]
        assert store(adapter, [one], [memory(number)]).is_successful()
    into = [memory(None) for _ in others]
    assert load(adapter, others, into) == [True] * 5
    assert [payload(o) for o in into] == [payload(memory(i)) for i in range(5)]
    assert lookup(adapter, [key(1)], layouts(dtype=torch.float16)) == [False]
    assert lookup(adapter, [*others, key(2)], {}) == [True] * 5 + [False]  # without the layouts, which are a hint
    assert lookup(adapter, [key(1, object_group_id=7)], {}) == [False]


def check_objects_of_several_tensors(make: Make) -> None:
    adapter = make("memory")
    shapes = (torch.Size((2, 3, 64, 48)), torch.Size((1, 2, 64, 33)))
    stored, into = memory(1, shapes), memory(None, shapes)
    assert store(adapter, [key(1)], [stored]).is_successful()
    assert lookup(adapter, [key(1)], layouts(*shapes)) == [True]
    assert load(adapter, [key(1)], [into]) == [True]
    assert payload(into) == payload(stored)


def check_two_weights_of_one_name_share_nothing(make: Make, tmp_path: Path) -> None:
    storage = f"{{plugin: disk, path: {tmp_path / 'cache'}}}"
    one, two = make(storage, weights="v1"), make(storage, weights="v2")
    assert store(one, [key(1)], [memory(1)]).is_successful()
    assert lookup(one, [key(1)]) == [True]
    assert lookup(two, [key(1)]) == [False]


def check_a_store_that_fails(make: Make) -> None:
    adapter = make("{plugin: faulty, error_rate: 1.0, storage: memory}")
    assert not store(adapter, [key(1)], [memory(1)]).is_successful()
    assert lookup(adapter, [key(1)]) == [False]
    assert load(adapter, [key(1)], [memory(None)]) == [False]
    assert adapter.report_status()["is_healthy"]


def check_corrupted_objects_are_misses(make: Make) -> None:
    adapter = make("{plugin: faulty, operations: [load], flip_rate: 1.0, storage: memory}")
    assert store(adapter, [key(1)], [memory(1)]).is_successful()
    assert lookup(adapter, [key(1)]) == [True]
    assert load(adapter, [key(1)], [memory(None)]) == [False]


def check_what_waits_to_be_stored_is_bounded(make: Make) -> None:
    size = memory(1).get_size()
    slow = "{plugin: faulty, operations: [store], latency: 3s, storage: memory}"
    adapter = make(slow, queue_size=f"{STORE_THREADS * size}B")
    waiting = [adapter.submit_store_task([key(10 + i)], [memory(1)]) for i in range(STORE_THREADS)]
    refused = adapter.submit_store_task([key(3)], [memory(3)])
    results = adapter.pop_completed_store_tasks()
    assert not results[refused].is_successful(), "it is told at once, however long the others take"
    give_up = time.monotonic() + PATIENCE_S
    while len(results) <= STORE_THREADS:
        assert time.monotonic() < give_up
        results |= adapter.pop_completed_store_tasks()
        time.sleep(0.005)
    assert all(results[task].is_successful() for task in waiting)
    assert adapter.report_status()["refused_store_objects"] == 1
    assert store(adapter, [key(3)], [memory(3)]).is_successful()


def check_a_storage_that_hangs(make: Make) -> None:
    """Within the tier's time, and the end does not wait for it."""
    adapter = make("{plugin: faulty, operations: [exists, store], hang_rate: 1.0, storage: memory}", timeout="300ms")
    assert lookup(adapter, [key(1)]) == [False]
    assert not store(adapter, [key(1)], [memory(1)]).is_successful()
    adapter.close()


def check_deletion_and_listeners(make: Make) -> None:
    class Listener(L2AdapterListener):
        heard: list[tuple[str, int]] = []

        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            self.heard.append(("stored", sum(sizes)))

        def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
            self.heard.append(("accessed", len(keys)))

        def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
            self.heard.append(("deleted", len(keys)))

    adapter = make("memory")
    adapter.register_listener(Listener())
    size = memory(1).get_size()
    assert store(adapter, [key(1), key(2, cache_salt="alice")], [memory(1), memory(2)]).is_successful()
    assert adapter.get_usage().total_bytes_used == 2 * size
    assert adapter.get_usage().bytes_by_cache_salt == {"": size, "alice": size}
    assert adapter.get_usage().usage_fraction < 0  # kvcore's tiers keep to their capacity themselves
    assert lookup(adapter, [key(1), key(3)]) == [True, False]
    adapter.delete([key(1), key(9, model_name="never seen")])
    assert lookup(adapter, [key(1)]) == [False]
    assert adapter.get_usage().total_bytes_used == size
    assert Listener.heard == [("stored", 2 * size), ("accessed", 1), ("deleted", 1)]


def check_lmcaches_own_serde_is_noticed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    adapter = make("memory")
    assert store(adapter, [key(1)], [memory(1, (torch.Size((5000,)),), torch.uint8)]).is_successful()
    with caplog.at_level(logging.WARNING, "kvcore"):
        assert lookup(adapter, [key(1)]) == [False]
        assert lookup(adapter, [key(1)]) == [False]
    assert len([r for r in caplog.records if "take it out and use `serde:` of kvcore's tiers" in r.message]) == 1


def check_after_the_end_all_is_a_miss(make: Make) -> None:
    adapter = make("memory")
    assert store(adapter, [key(1)], [memory(1)]).is_successful()
    adapter.close()
    adapter.close()
    task = adapter.submit_load_task([key(1)], [memory(None)])
    assert not adapter.query_load_result(task).test(0)
    assert not adapter.report_status()["is_healthy"]
    adapter.delete([key(1)])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"confg": "x"}, "adapter_params.confg"),
        ({"set": {"l2[0].storage": "dsk"}}, "dsk"),
        ({"config": "/not/there"}, "/not/there"),
    ],
)
def check_a_wrong_configuration_is_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("/", ".")):
        create(**params)
