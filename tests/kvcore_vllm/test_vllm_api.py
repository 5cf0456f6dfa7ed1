"""Every part of vLLM that kvcore relies on, by name: a version that changes one fails here with that name."""

import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MEMBERS = {
    # the connector
    f"{V1}.base:KVConnectorBase_V1": (
        "get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
        "on_new_request request_finished has_pending_push_work reset_cache take_events set_xfer_handshake_metadata "
        "get_external_cache_hit_sources requires_kv_delivery shutdown register_kv_caches get_handshake_metadata "
        "handle_preemptions start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_finished "
        "get_transfer_results get_block_ids_with_load_errors build_connector_worker_meta get_kv_connector_stats "
        "build_kv_connector_stats build_prom_metrics _get_connector_metadata requires_piecewise_for_cudagraph"
    ),
    f"{V1}.base:SupportsHMA": "request_finished_all_groups",
    f"{V1}.base:KVConnectorRole": "SCHEDULER WORKER",
    f"{V1}.base:KVConnectorMetadata": "",
    f"{V1}.base:KVConnectorHandshakeMetadata": "",
    f"{V1}.base:KVConnectorWorkerMetadata": "aggregate",
    f"{V1}.base:KVConnectorTransferResults": "finished_sending finished_recving failed_recving",
    f"{V1}.metrics:KVConnectorStats": "data reset aggregate reduce is_empty",
    f"{V1}.metrics:KVConnectorPromMetrics": "observe",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": "_registry register_connector",
    "vllm.distributed.kv_events:BlockStored": "block_hashes parent_block_hash token_ids block_size medium",
    "vllm.distributed.kv_events:BlockRemoved": "block_hashes medium",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "HOST DISK EXTERNAL_UNSPECIFIED",
    # the forward pass, layer by layer
    "vllm.config:CUDAGraphMode": "FULL",
    "vllm.forward_context:ForwardContext": "attn_metadata cudagraph_runtime_mode ubatch_slices",
    "vllm.v1.request:Request": (
        "all_token_ids num_tokens request_id num_prompt_tokens prompt_token_ids lora_request cache_salt trace_headers"
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs finished_req_ids preempted_req_ids",
    # the model and how it is run, whichever of the two
    "vllm.config:VllmConfig": (
        "model_config cache_config parallel_config load_config lora_config speculative_config kv_transfer_config "
        "kv_events_config compilation_config attention_config"
    ),
    "vllm.config:ModelConfig": (
        "model revision dtype quantization max_model_len hf_config multimodal_config is_encoder_decoder is_diffusion"
    ),
    "vllm.config:CacheConfig": "cache_dtype prefix_caching_hash_algo enable_prefix_caching",
    "vllm.config:ParallelConfig": (
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size nnodes "
        "use_ubatching"
    ),
    "vllm.config:LoadConfig": "load_format",
    "vllm.config:SpeculativeConfig": "method uses_draft_kv_cache",
    "vllm.config:KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy is_kv_producer is_kv_consumer",
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "kv_cache_groups num_blocks kv_cache_layout hash_block_size prefix_cacheable_group_ids"
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size dtype head_size non_causal",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.platforms.interface:Platform": "is_cpu device_type get_device_capability",
    # its command line
    "vllm.engine.arg_utils:EngineArgs": "model kv_transfer_config kv_offloading_size",
    # the secondary tier
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager": (
        "lookup submit_store submit_load get_finished_jobs on_new_request on_request_finished on_schedule_end "
        "drain_jobs shutdown build_metric_definitions get_stats block_size_bytes"
    ),
    "vllm.v1.kv_offload.tiering.base:TransferJob": "job_id keys chunk_ids req_context",
    "vllm.v1.kv_offload.tiering.base:JobResult": "job_id success successful_keys transfer_time transfer_bytes",
    "vllm.v1.kv_offload.tiering.factory:SecondaryTierFactory": "_registry register_tier create_secondary_tier",
    "vllm.v1.kv_offload.tiering.spec:TieringOffloadingSpec": "get_manager",
    "vllm.v1.kv_offload.base:LookupResult": "HIT MISS RETRY",
    "vllm.v1.kv_offload.base:Medium": "STORAGE",
    "vllm.v1.kv_offload.base:Locality": "LOCAL REMOTE",
    "vllm.v1.kv_offload.base:ReqContext": "req_id kv_transfer_params",
    "vllm.v1.kv_offload.base:RequestOffloadingContext": "policy",
    "vllm.v1.kv_offload.base:OffloadingCounterMetadata": "documentation",
    "vllm.v1.kv_offload.config:OffloadingConfig": "groups cache parallel canonical_layout",
    "vllm.v1.kv_offload.config:OffloadingGroupConfig": "group_id tokens_per_block layer_names",
    "vllm.v1.kv_offload.config:OffloadingCacheConfig": "tokens_per_hash blocks_per_chunk",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig": "world_size tp_size pp_size pcp_size dcp_size",
    f"{V1}.offloading.metrics:OffloadingConnectorStats": "increase_counter",
}
PARAMETERS = {
    f"{V1}.base:KVConnectorBase_V1.__init__": "vllm_config role kv_cache_config",
    f"{V1}.base:KVConnectorBase_V1.on_new_request": "request",
    f"{V1}.base:KVConnectorBase_V1.get_num_new_matched_tokens": "request num_computed_tokens",
    f"{V1}.base:KVConnectorBase_V1.update_state_after_alloc": "request blocks num_external_tokens",
    f"{V1}.base:KVConnectorBase_V1.handle_preemptions": "kv_connector_metadata",
    f"{V1}.base:KVConnectorBase_V1.start_load_kv": "forward_context",
    f"{V1}.base:KVConnectorBase_V1.wait_for_layer_load": "layer_name",
    f"{V1}.base:KVConnectorBase_V1.save_kv_layer": "layer_name kv_layer attn_metadata",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": "request start_token_idx end_token_idx",
    "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash": "",
    "vllm.v1.core.kv_cache_utils:to_event_extra_keys": "",
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_kind": "",
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window": "",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": "",
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "dtype block_size head_size kv_cache_dtype",
    # a tier finds the engine's configuration in the frame of this call
    f"{V1}.offloading.scheduler:OffloadingConnectorScheduler.__init__": "spec vllm_config kv_cache_config",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.__init__": (
        "offloading_spec primary_kv_view tier_type backpressure_detector"
    ),
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.lookup": "key req_context",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.submit_load": "job_metadata",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.submit_store": "job_metadata",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.on_schedule_end": "context",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager.build_metric_definitions": "extra_config",
    "vllm.v1.kv_offload.tiering.factory:SecondaryTierFactory.register_tier": "tier_type module_path class_name",
}


@pytest.mark.parametrize("where", MEMBERS)
def test_has(where: str) -> None:
    thing = find(where)
    fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    known = fields | set(dir(thing)) | {n for c in inspect.getmro(thing) for n in getattr(c, "__annotations__", {})}
    known |= set(inspect.signature(thing.__init__).parameters)
    source = inspect.getsource(thing.__init__) if "__init__" in vars(thing) and not fields else ""
    missing = [n for n in MEMBERS[where].split() if n not in known and f"self.{n}" not in source]
    assert not missing, f"{where} has no {', '.join(missing)}"


@pytest.mark.parametrize("where", PARAMETERS)
def test_takes(where: str) -> None:
    known = inspect.signature(find(where)).parameters
    missing = [n for n in PARAMETERS[where].split() if n not in known]
    assert not missing, f"{where} has no parameter {', '.join(missing)}"


@pytest.mark.parametrize("module", ["vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"])
def test_can_be_started_as(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert '__name__ == "__main__"' in Path(spec.origin).read_text()


def test_an_offload_key_is_a_hash_and_a_group() -> None:
    base: Any = importlib.import_module("vllm.v1.kv_offload.base")
    key = base.make_offload_key(b"h" * 32, 7)
    assert (key[:-4], int.from_bytes(key[-4:], "big")) == (b"h" * 32, 7)


def test_the_tier_may_leave_out_what_is_not_abstract() -> None:
    from kvcore_vllm.tier import KVCoreTier

    assert not inspect.isabstract(KVCoreTier)


def find(where: str) -> Any:
    module, _, names = where.partition(":")
    thing: Any = importlib.import_module(module)
    for name in names.split("."):
        assert hasattr(thing, name), f"{where}: there is no {name}"
        thing = getattr(thing, name)
    return thing
