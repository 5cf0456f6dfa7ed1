"""Lets vLLM's own offloading run on its CPU backend, so that it can stand beside kvcore in `ttft.py`.

vLLM ships a copy worker for CUDA and XPU only. This one copies with torch; scheduling, the host tier and the file tier
are vLLM's own. Its copy speed says nothing about vLLM's.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies blocks between the paged KV and the host region, inside the call."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._groups = kv_caches.group_data_refs
        self._per_chunk = blocks_per_chunk
        self._region = region
        self._paged, self._host = [], []
        for t in kv_caches.tensors:
            self._paged.append(t.tensor.view(torch.int8).view(-1, t.page_size_bytes))
            self._host.append(region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk))
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src: Any, dst: Any) -> bool:
        return self._move(job_id, src, dst.block_ids, load=False)

    def submit_load(self, job_id: int, src: Any, dst: Any) -> bool:
        return self._move(job_id, dst, src.block_ids, load=True)

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Any) -> None:
        pass

    def shutdown(self) -> None:
        self._host = []
        self._region.cleanup()

    def _move(self, job_id: int, paged: Any, chunks: Any, *, load: bool) -> bool:
        began, nbytes, block, chunk = time.perf_counter(), 0, 0, 0
        for group, (count, first) in enumerate(zip(paged.group_sizes, paged.block_indices, strict=True)):
            if not count:
                continue
            skip = first % self._per_chunk
            for j in range(count):
                row, part = divmod(skip + j, self._per_chunk)
                for ref in self._groups[group]:
                    a = self._paged[ref.tensor_idx][int(paged.block_ids[block + j])]
                    size = a.shape[0]
                    b = self._host[ref.tensor_idx][int(chunks[chunk + row]), part * size : (part + 1) * size]
                    if load:
                        a.copy_(b)
                    else:
                        b.copy_(a)
                    nbytes += size
            block += count
            chunk += -(-(count + skip) // self._per_chunk)
        self._results.append(TransferResult(job_id, True, nbytes, time.perf_counter() - began))
        return True


class CpuOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering offload with `CopyWorker`."""

    def get_worker(self, kv_caches: Any) -> CopyWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
