"""The two classes that TensorRT-LLM is told of. Interface-tested: they have not run in TensorRT-LLM.

    kv_connector_config:
      connector_module: kvcore_trtllm.connector
      connector_scheduler_class: KVCoreScheduler
      connector_worker_class: KVCoreWorker

The interface has no options: `KVCORE_CONFIG` names the configuration file, in the environment of every rank.
"""

from collections.abc import Callable
from typing import Any

from kvcore_trtllm import INTERFACE_TESTED, _compat
from kvcore_trtllm.faults import logger
from kvcore_trtllm.link import link, unlink
from kvcore_trtllm.metadata import Metadata
from kvcore_trtllm.scheduler import LOOKUP_WAIT_S, SchedulerHalf
from kvcore_trtllm.worker import WorkerHalf

_Scheduler, _Worker = _compat.base_classes()


class KVCoreScheduler(_Scheduler):  # type: ignore[misc,valid-type]
    """Rank 0's half that plans. See `kvcore_trtllm.scheduler`."""

    lookup_wait_s = LOOKUP_WAIT_S
    """How long a lookup may hold TensorRT-LLM's scheduler, in seconds; for a subclass to change."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        logger.warning("kvcore-trtllm is %s", INTERFACE_TESTED)
        self.half = SchedulerHalf(llm_args, link(llm_args), self.lookup_wait_s)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """See TensorRT-LLM. Loads are always asynchronous: only such a request can be kept waiting."""
        matched: tuple[int, bool] = self.half.matched(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """See TensorRT-LLM."""
        self.half.allocated(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """See TensorRT-LLM."""
        return self.half.step(scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """See TensorRT-LLM."""
        return bool(self.half.finished(request))

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """See TensorRT-LLM's documentation; what is under way already ends by itself."""
        self.half.cancelled(request, start, end)

    def request_reset(self, request: Any) -> None:
        """See TensorRT-LLM's documentation."""
        self.half.reset(request)

    def close(self) -> None:
        """Write out what waits for a tier and let go of everything. Idempotent; TensorRT-LLM does not call it."""
        self.half.close()
        unlink(self.half._args)


class KVCoreWorker(_Worker):  # type: ignore[misc,valid-type]
    """Each rank's half that copies. See `kvcore_trtllm.worker`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._args = llm_args
        self._rank = _compat.rank()
        self.half = WorkerHalf(self._rank)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """See TensorRT-LLM."""
        tensor = self.half.register(kv_cache_tensor)
        if self._rank == 0:
            link(self._args).tensor = tensor

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """See TensorRT-LLM."""
        return self.half.forward_ended

    def start_load_kv(self, stream: Any) -> None:
        """See TensorRT-LLM."""
        meta = self.get_connector_meta()
        if isinstance(meta, Metadata):
            self.half.load(meta)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """A request is whole before it is scheduled: there is nothing to wait for."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Saves begin when all layers are written."""

    def wait_for_save(self, stream: Any) -> None:
        """See TensorRT-LLM. Saves are asynchronous: none is waited for."""
        meta = self.get_connector_meta()
        if isinstance(meta, Metadata):
            self.half.save(meta, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """See TensorRT-LLM."""
        ended: tuple[list[int], list[int]] = self.half.finished(finished_gen_req_ids, started_loading_req_ids)
        return ended

    def close(self) -> None:
        """Let go of everything. Idempotent; TensorRT-LLM does not call it."""
        self.half.close()
