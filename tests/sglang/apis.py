"""Every name of SGLang that kvcore-sglang relies on: `module:name`, with its parameters where it is called or
overridden with these. `Class.field` may be a dataclass's field; `= value` is what an enumeration's member must be."""

STORAGE = "sglang.srt.mem_cache.hicache_storage"
CONFIG = (
    "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "is_mla_model",
    "enable_storage_metrics", "extra_config",
)  # fmt: skip
RUN_ARGUMENTS = (
    "model_path", "revision", "lora_paths", "attention_backend", "prefill_attention_backend",
    "decode_attention_backend", "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "load_format",
    "json_model_override_args", "context_length", "speculative_algorithm", "speculative_draft_model_path",
    "speculative_draft_model_revision",
)  # fmt: skip
SHARED_POOLS = (
    "kv", "swa", "auxiliary_swa", "indexer", "draft_indexer", "deepseek_v4_c1", "deepseek_v4_c1_indexer",
    "deepseek_v4_c1_indexer_scale", "deepseek_v4_c2", "deepseek_v4_c2_indexer", "deepseek_v4_c2_indexer_scale",
    "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c4_indexer_scale", "deepseek_v4_c128",
    "deepseek_v4_c4_rope", "deepseek_v4_c128_rope", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c128_state",
)  # fmt: skip

APIS = (
    f"{STORAGE}:HiCacheStorage",
    f"{STORAGE}:HiCacheStorage.register_mem_pool_host(self, mem_pool_host)",
    f"{STORAGE}:HiCacheStorage.register_mem_host_pool_v2(self, host_pool, host_pool_name)",
    f"{STORAGE}:HiCacheStorage.batch_exists(self, keys, extra_info)",
    f"{STORAGE}:HiCacheStorage.batch_get_v1(self, keys, host_indices, extra_info)",
    f"{STORAGE}:HiCacheStorage.batch_set_v1(self, keys, host_indices, extra_info)",
    f"{STORAGE}:HiCacheStorage.batch_exists_v2(self, keys, pool_transfers, extra_info)",
    f"{STORAGE}:HiCacheStorage.batch_get_v2(self, transfers, extra_info)",
    f"{STORAGE}:HiCacheStorage.batch_set_v2(self, transfers, extra_info)",
    f"{STORAGE}:HiCacheStorage.exists(self, key)",
    f"{STORAGE}:HiCacheStorage.get(self, key, target_location, target_sizes)",
    f"{STORAGE}:HiCacheStorage.batch_get(self, keys, target_locations, target_sizes)",
    f"{STORAGE}:HiCacheStorage.set(self, key, value, target_location, target_sizes)",
    f"{STORAGE}:HiCacheStorage.batch_set(self, keys, values, target_locations, target_sizes)",
    f"{STORAGE}:HiCacheStorage.clear(self)",
    f"{STORAGE}:HiCacheStorage.get_stats(self)",
    *(f"{STORAGE}:HiCacheStorageConfig.{field}" for field in CONFIG),
    *(f"{STORAGE}:PoolTransfer.{field}" for field in ("name", "host_indices", "keys", "hit_policy")),
    f"{STORAGE}:PoolHitPolicy.TRAILING_PAGES",
    f"{STORAGE}:PoolHitPolicy.BLOCK_GROUPS",
    f"{STORAGE}:PoolTransferResult(kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages)",
    *(f"{STORAGE}:PoolName.{pool.upper()} = {pool}" for pool in SHARED_POOLS),
    "sglang.srt.observability.metrics_collector:StorageMetrics"
    "(prefetch_pgs, backup_pgs, prefetch_bandwidth, backup_bandwidth)",
    "sglang.srt.runtime_context:get_server_args()",
    *(f"sglang.srt.server_args:ServerArgs.{name}" for name in RUN_ARGUMENTS),
    "sglang.srt.lora.lora_registry:LoRARef.lora_name",
    "sglang.srt.lora.lora_registry:LoRARef.lora_path",
    "sglang.srt.lora.lora_registry:LoRARef.deterministic_id(lora_name, lora_path)",
    "sglang.srt.mem_cache.pool_host.base:HostKVCache.get_data_page(self, index, flat)",
    "sglang.srt.mem_cache.pool_host.base:HostKVCache.get_dummy_flat_data_page(self)",
    "sglang.srt.mem_cache.pool_host.base:HostKVCache.set_from_flat_data_page(self, index, data_page)",
    "sglang.srt.mem_cache.pool_host.base:HostKVCache.storage_format_tag",
    "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost.get_page_buffer_meta(self, indices)",
    "sglang.srt.mem_cache.pool_host.mla:MLATokenToKVPoolHost.get_page_buffer_meta(self, indices)",
    "sglang.srt.mem_cache.memory_pool_host:DeepSeekV4PagedHostPool.get_page_buffer_meta(self, indices)",
    "sglang.srt.mem_cache.memory_pool_host:LogicalHostPool",
    "sglang.srt.mem_cache.storage:StorageBackendFactory.create_backend"
    "(backend_name, storage_config, mem_pool_host, kwargs)",
    "sglang.srt.mem_cache.utils:get_storage_hash_str",
    "sglang.srt.mem_cache.utils:get_hash_str",
)

POOL_ATTRIBUTES = (
    "page_size", "layout", "dtype", "size_per_token", "start_layer", "end_layer", "head_num", "head_dim",
)  # fmt: skip
"""Of a host pool, which are set as it is made."""
