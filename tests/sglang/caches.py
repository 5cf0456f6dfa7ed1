"""SGLang's cache without an engine: its real radix tree, controller, host pool and backend factory, over tensors of
this process that stand for a device's memory. Imported by `scenarios.py` only, never by pytest."""

import json
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs

PAGE, LAYERS, HEADS, DIM, SIZE = 16, 3, 2, 32, 512
PATIENCE_S = 60.0
BACKEND = {"backend_name": "kvcore", "module_path": "kvcore_sglang.backend", "class_name": "KVCoreHiCache"}


def disk(folder: Path) -> list[dict[str, Any]]:
    """A tier of files."""
    return [{"storage": {"plugin": "disk", "path": str(folder), "capacity": "1GiB"}}]


class Cache:
    """One engine's cache: `device` memory, host pool, and kvcore behind it."""

    def __init__(
        self,
        model: Path,
        options: dict[str, Any],
        *,
        layout: str = "page_first",
        io: str = "kernel",
        in_place: bool = True,
        mla: bool = False,
    ) -> None:
        extra = {**BACKEND, "prefetch_threshold": PAGE, **options}
        if in_place:
            extra["interface_v1"] = 1
        args = ServerArgs(
            model_path=str(model), device="cpu", attention_backend="torch_native", page_size=PAGE,
            disable_cuda_graph=True, enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_mem_layout=layout,
            hicache_io_backend=io, hicache_write_policy="write_through", hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete", hicache_storage_backend_extra_config=json.dumps(extra),
        )  # fmt: skip
        runtime_context.reset_context()
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
        kind = torch.bfloat16
        self.device: Any = (
            MLATokenToKVPool(SIZE, PAGE, kind, 64, 16, LAYERS, "cpu", False)
            if mla
            else MHATokenToKVPool(SIZE, PAGE, kind, HEADS, DIM, LAYERS, "cpu", False)
        )
        self.slots = PagedTokenToKVPoolAllocator(SIZE, PAGE, kind, "cpu", self.device, need_sort=False)
        requests = ReqToTokenPool(size=4, max_context_len=1024, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=self.slots, page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )  # fmt: skip
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)

    @property
    def backend(self) -> Any:
        """kvcore's backend, as SGLang holds it."""
        return self.tree.cache_controller.storage_backend

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The device's memory, layer by layer."""
        if hasattr(self.device, "k_buffer"):
            return [*self.device.k_buffer, *self.device.v_buffer]
        return list(self.device.kv_buffer)

    def content(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What stands in these slots, layer by layer."""
        return [buffer[slots].clone() for buffer in self.buffers]

    def pump(self, done: Callable[[], Any], what: str) -> None:
        """Let SGLang go on until `done()`."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < until, f"not within {PATIENCE_S:g} s: {what}"
            self.tree.check_hicache_events()
            time.sleep(0.005)

    def compute(self, tokens: list[int]) -> list[torch.Tensor]:
        """Put random KV of a prompt onto the device and into the tree, and wait until it is written through to the
        storage; the KV."""
        for buffer in self.buffers:
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
        slots = self.slots.alloc(len(tokens))
        content = self.content(slots)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=slots))
        tree = self.tree
        self.pump(lambda: not tree.ongoing_write_through and not tree.ongoing_backup, "the pages are stored")
        return content

    def fetch(self, tokens: list[int]) -> list[torch.Tensor] | None:
        """Bring a prompt's KV from the storage to the device; None when nothing of it was there."""
        key = RadixKey(array("q", tokens), None)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        assert (match.device_prefix_len, match.host_hit_length) == (0, 0)
        handle = CacheRequestHandle(uuid.uuid4().hex, 0)
        self.tree.prefetch_from_storage(handle, match.last_host_node, array("q", tokens))
        self.pump(lambda: self.tree.check_prefetch_progress(handle), "the pages are fetched")
        loaded = self.tree.pop_prefetch_loaded_tokens(handle)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        assert match.host_hit_length == loaded
        if not loaded:
            return None
        request = _Request(handle.rid, match.last_device_node)
        self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        self.tree.ready_to_load_host_cache()
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        assert match.device_prefix_len == loaded
        slots = self.tree.tree_core.collect_full_device_indices(match.best_match_node, self.tree.root_node_handle())
        return self.content(slots)


class _Request:
    """What SGLang's load-back reads of a request."""

    def __init__(self, rid: str, last_node: Any) -> None:
        self.rid = rid
        self.last_node = last_node
        self.swa_host_hit_length = self.mamba_host_hit_length = 0
        self.kv = self

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def cache(model: Path, options: dict[str, Any], **kwargs: Any) -> Iterator[Cache]:
    """A cache for the time of a block."""
    made = Cache(model, options, **kwargs)
    try:
        yield made
    finally:
        made.tree.shutdown()


def prompt(seed: int, pages: int) -> list[int]:
    """Tokens of so many pages."""
    return [seed * 10_000 + i for i in range(pages * PAGE)]
