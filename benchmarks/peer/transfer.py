"""Paged KV and L1 on the CPU, one thread: what its server runs, with its own L1 around it."""

import hashlib
import random
import time
from typing import Any

import torch
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer
from serve import SETTING, serve

torch.set_num_threads(1)
LAYERS, HEADS, SIZE = SETTING["layers"], SETTING["heads"], SETTING["head_size"]
BLOCK, CHUNK, CHUNKS = SETTING["block_tokens"], SETTING["chunk_tokens"], SETTING["chunks"]
BLOCKS, SPARE = CHUNKS * CHUNK // BLOCK, 8
split = SETTING["split"]
FORMAT = EngineKVFormat.NL_X_TWO_NB_BS_NH_HS if split else EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
shape = (2, BLOCKS + SPARE, BLOCK, HEADS, SIZE) if split else (BLOCKS + SPARE, 2, BLOCK, HEADS, SIZE)
source = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
for layer in source:
    layer.view(torch.int16).random_(0, 1000)
target = [torch.zeros_like(layer) for layer in source]
layout = MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK, HEADS * SIZE])], [torch.bfloat16])
nbytes = 2 * LAYERS * CHUNK * HEADS * SIZE * 2 * CHUNKS
l1 = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(nbytes + (64 << 20), False, shm_name="")))
keys = [ObjectKey(hashlib.sha256(f"{i}".encode()).digest(), "m", 0x01000100) for i in range(CHUNKS)]
order = list(range(BLOCKS))
random.Random(1).shuffle(order)
ids = torch.tensor(order)
pages = PageBufferShapeDesc()
pages.nl, pages.nb, pages.bs, pages.nh, pages.hs = LAYERS, BLOCKS + SPARE, BLOCK, HEADS, SIZE
pages.kv_size, pages.element_size = 2, 2


def move(layers: list[Any], objects: list[Any], direction: Any) -> None:
    tensors = [o.tensor for o in objects]
    multi_layer_block_kv_transfer(layers, tensors, ids, "cpu", direction, pages, CHUNK, FORMAT, 0)


def store() -> float:
    best = 1e9
    for _ in range(2):
        l1.clear(force=True)
        begun = time.perf_counter()
        reserved = l1.reserve_write(keys, [False] * CHUNKS, layout)
        move(source, [reserved[k][1] for k in keys], TransferDirection.D2H)
        l1.finish_write(keys)
        best = min(best, time.perf_counter() - begun)
    return nbytes / best / 1e9


def load() -> float:
    best = 1e9
    for _ in range(2):
        begun = time.perf_counter()
        reserved = l1.reserve_read(keys)
        move(target, [reserved[k][1] for k in keys], TransferDirection.H2D)
        l1.finish_read(keys)
        best = min(best, time.perf_counter() - begun)
    return nbytes / best / 1e9


store()
load()
for a, b in zip(source, target, strict=True):
    got = (a[:, ids], b[:, ids]) if split else (a[ids], b[ids])
    if not torch.equal(*got):
        raise SystemExit("its round trip failed")
serve({"transfer.store": store, "transfer.load": load})
