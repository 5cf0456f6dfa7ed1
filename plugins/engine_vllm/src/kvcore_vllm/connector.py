"""The connector that vLLM loads: it hands every call to the half that this process needs."""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvcore_vllm import _compat
from kvcore_vllm.faults import logger
from kvcore_vllm.metadata import Metadata, WorkerLayout
from kvcore_vllm.options import PREFIX, parse_options
from kvcore_vllm.scheduler import SchedulerHalf
from kvcore_vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore_vllm.worker import WorkerHalf


class KVCoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes two: one in the scheduler's process, which owns the cache, and one in each worker.

    Options stand in `kv_connector_extra_config`; see `kvcore_vllm.options`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _compat.share_log()
        options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            found = _compat.installed_vllm()
            if found is not None and not _compat.is_tested(found[1]):
                logger.warning("kvcore-vllm was tested with vLLM %s, this is %s %s", _compat.TESTED, *found)
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, options)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is a later miss, nothing more."""
        return False

    def shutdown(self) -> None:
        """Release everything of this half. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # -- scheduler ---------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerHalf:
        """This process's half, in the scheduler."""
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers' layouts, by tensor-parallel rank."""
        layouts = {rank: layout for rank, layout in metadata.items() if isinstance(layout, WorkerLayout)}
        if layouts:
            self.scheduler.set_layouts(layouts)

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        self.scheduler.queued(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM."""
        matched: tuple[int | None, bool] = self.scheduler.matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """See vLLM."""
        return self.scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """See vLLM."""
        return self.scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        self.scheduler.update(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        ended: tuple[bool, dict[str, Any] | None] = self.scheduler.finished(request)
        return ended

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        ended: tuple[bool, dict[str, Any] | None] = self.scheduler.finished(request)
        return ended

    def has_pending_push_work(self) -> bool:
        """Asynchronous saves are published by what a later step reports."""
        return self.scheduler.busy()

    def reset_cache(self) -> bool | None:
        """See `SchedulerHalf.reset`. vLLM calls it for `reset_prefix_cache(reset_connector=True)` only."""
        return bool(self.scheduler.reset())

    def take_events(self) -> Iterable[Any]:
        """What came into the cache and what left it, where vLLM publishes KV events."""
        return self.scheduler.take_events()

    # -- worker ------------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerHalf:
        """This process's half, in a worker."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See vLLM."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerLayout | None:
        """This rank's layout."""
        return self.worker.layout()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See vLLM. Called once a step, before the metadata is bound."""
        self.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM."""
        self.worker.load(self._meta, forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM."""
        if self.worker.loading:
            self.worker.before_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM."""
        if self.worker.saving:
            self.worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        """See vLLM."""
        self.worker.save(self._meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM."""
        sent, recved, _ = self.worker.results(self._meta)
        return sent or None, recved or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See vLLM."""
        return _compat.transfer_results(*self.worker.results(self._meta))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM."""
        return self.worker.bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        """See vLLM."""
        return self.worker.report(self._meta)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer in every step means no graph of a whole step. With `auto`, a step that is one graph is copied
        whole."""
        return extra_config.get(PREFIX + "layerwise") == "on"

    @property
    def _meta(self) -> Metadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Metadata)
        return meta

    # -- numbers -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVCoreStats | None:
        """See vLLM."""
        if self._scheduler is None:
            return self.worker.stats()
        self._scheduler.end_step()  # vLLM asks once for each step's result
        return self._scheduler.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVCoreStats:
        """See vLLM."""
        return KVCoreStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVCorePromMetrics:
        """See vLLM."""
        return KVCorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
