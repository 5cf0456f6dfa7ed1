"""L1: its L1Manager and allocator, objects of 2 MiB in an arena of 1 GiB, 128 chunks per call.

Its writes never evict here (it evicts from a thread of its own), ours always do.
"""

import hashlib
import random

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from serve import SETTING, serve, us_each

CHUNKS = SETTING["chunks"]
MODEL, RANK = "meta-llama/Llama-3-8B", 0x01000100
layout = MemoryLayoutDesc([torch.Size([2, 32, 256, 64])], [torch.bfloat16])
keys = [ObjectKey(hashlib.sha256(f"{i}".encode()).digest(), MODEL, RANK) for i in range(CHUNKS)]
other = [ObjectKey(hashlib.sha256(f"w{i}".encode()).digest(), MODEL, RANK) for i in range(CHUNKS)]


def manager() -> L1Manager:
    return L1Manager(L1ManagerConfig(L1MemoryManagerConfig(1 << 30, False, shm_name="")))


reads, writes = manager(), manager()
reads.reserve_write(keys, [False] * CHUNKS, layout)
reads.finish_write(keys)


def write() -> None:
    if len(writes.reserve_write(other, [False] * CHUNKS, layout)) != CHUNKS:
        raise AssertionError("a chunk found no room")
    writes.finish_write(other)


memory = L1MemoryManager(L1MemoryManagerConfig(1 << 30, False, align_bytes=4096, shm_name=""))


def one_size() -> None:
    _, objects = memory.allocate(layout, CHUNKS)
    memory.free(objects)


# As in kvcore_bench.speed.l1: five sizes in small batches, given back in another order.
rng = random.Random(1)
batches = [
    (MemoryLayoutDesc([torch.Size([rng.choice((64, 65, 96, 160, 257)) * 4096])], [torch.uint8]), rng.randint(1, 16))
    for _ in range(120)
]
order = list(range(len(batches)))
rng.shuffle(order)
slots = sum(count for _, count in batches)


def mixed() -> None:
    taken = [memory.allocate(kind, count)[1] for kind, count in batches]
    if sum(map(len, taken)) != slots:
        raise AssertionError("no room")
    for i in order:
        memory.free(taken[i])


def read() -> None:
    reads.reserve_read(keys)


def end() -> None:
    reads.finish_read(keys)


serve(
    {
        "l1.lookup_hit": us_each(read, CHUNKS, after=end),
        "l1.end_read": us_each(end, CHUNKS, before=read),
        "l1.reserve_publish": us_each(write, CHUNKS, after=lambda: writes.clear(force=True)),
        "l1.alloc_free": us_each(one_size, CHUNKS),
        "l1.alloc_free_mixed": us_each(mixed, slots, repeats=5),
    }
)
