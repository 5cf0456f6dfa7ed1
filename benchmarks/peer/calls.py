"""The library level that an engine's connector ends at: its StorageManager, 128 resident chunks of 2 MiB, LRU."""

import hashlib
import itertools

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from serve import SETTING, serve, us_each

CHUNKS = SETTING["chunks"]
layout = MemoryLayoutDesc([torch.Size([2, 32, 256, 64])], [torch.bfloat16])


def make_keys(tag: str) -> list[ObjectKey]:
    model, rank = "meta-llama/Llama-3-8B", 0x01000100
    return [ObjectKey(hashlib.sha256(f"{tag}{i}".encode()).digest(), model, rank) for i in range(CHUNKS)]


def manager() -> StorageManager:
    memory = L1MemoryManagerConfig(1 << 30, False, shm_name="")
    return StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU")))


keys, other = make_keys("a"), make_keys("w")
reads, writes = manager(), manager()
reads.finish_write(list(reads.reserve_write(keys, layout)))
task = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)])
names = itertools.count()


def look_up() -> None:
    handle = reads.submit_prefetch_task(task, f"r{next(names)}")
    while (result := reads.query_prefetch_status(handle)) is None:
        pass
    if result.l1_hit_count != CHUNKS:
        raise AssertionError(f"{result.l1_hit_count} hits")


def retrieve() -> None:
    with reads.read_prefetched_results(keys):
        pass


def release() -> None:
    reads.finish_read_prefetched(keys)


def write() -> None:
    writes.finish_write(list(writes.reserve_write(other, layout)))


serve(
    {
        "calls.lookup": us_each(look_up, CHUNKS, after=release),
        "calls.retrieve": us_each(retrieve, CHUNKS, before=look_up, after=release),
        "calls.release": us_each(release, CHUNKS, before=look_up),
        "calls.reserve_publish": us_each(write, CHUNKS, after=lambda: writes.delete_l1_keys(other)),
    }
)
