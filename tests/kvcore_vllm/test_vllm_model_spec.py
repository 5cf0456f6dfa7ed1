from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvcore.api import LayoutError
from kvcore_vllm import model_spec
from kvcore_vllm.layout import by_block
from kvcore_vllm.metadata import WorkerLayout

pytestmark = pytest.mark.vllm

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def full(block_size: int = 128, **kwargs: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS, **kwargs)


def window(tokens: int = 128, block_size: int = 128) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **HEADS)


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC")


def engine(**changes: Any) -> Any:
    """The fields of a `VllmConfig` that are looked at."""
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "nnodes": 1,
    }
    model = {
        "model": "org/name",
        "revision": None,
        "dtype": torch.float32,
        "quantization": None,
        "max_model_len": 100,
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "multimodal_config": None,
        "hf_config": SimpleNamespace(to_dict=lambda: {"rope": changes.pop("rope", "default")}),
    }
    for name in list(changes):
        for part in (parallel, model):
            if name in part:
                part[name] = changes.pop(name)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", **changes),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )


@pytest.mark.parametrize("specs", [(full(),), (full(), window(), window())], ids=["full", "hybrid"])
def test_supported(specs: tuple[KVCacheSpec, ...]) -> None:
    model_spec.check_supported(engine(), caches(*specs))


@pytest.mark.parametrize(
    ("config", "specs", "words"),
    [
        (engine(pipeline_parallel_size=2), [full()], "pipeline parallel size is 2"),
        (engine(decode_context_parallel_size=2), [full()], "decode context parallel size is 2"),
        (engine(prefill_context_parallel_size=4), [full()], "prefill context parallel size is 4"),
        (engine(nnodes=2), [full()], "number of nodes of one engine size is 2"),
        (engine(is_encoder_decoder=True), [full()], "encoder-decoder"),
        (engine(calculate_kv_scales=True), [full()], "calculate_kv_scales"),
        (
            engine(
                multimodal_config=MultiModalConfig(mm_processor_cache_gb=0),
                enable_prefix_caching=False,
            ),
            [full()],
            "names an image by a counter",
        ),
        (engine(), [], "no KV cache"),
        (
            engine(),
            [full(), MambaSpec(128, shapes=((1,),), dtypes=(torch.float32,))],
            "group 1 is of the kind MambaSpec",
        ),
        (
            engine(),
            [ChunkedLocalAttentionSpec(block_size=128, attention_chunk_size=256, **HEADS)],
            "ChunkedLocalAttentionSpec",
        ),
        (engine(), [full(non_causal=True)], "attends to later tokens"),
        (engine(), [full(128), window(128, 64)], r"different block sizes \(64, 128\)"),
    ],
)
def test_refused_in_one_sentence(config: Any, specs: list[KVCacheSpec], words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        model_spec.check_supported(config, caches(*specs))
    assert "\n" not in str(caught.value)


def layout(**changes: Any) -> WorkerLayout:
    fields: dict[str, Any] = {
        "block_bytes": {"layer.0": 1024, "layer.1": 2048},
        "shape": "float32[2, 128, 64]",
        "backend": "CPU_ATTN",
        "isa": "vec",
        "element_bytes": 4,
    }
    return WorkerLayout(**{**fields, **changes})


def test_the_spec_holds_what_the_workers_reported() -> None:
    spec = model_spec.build_spec(engine(), caches(full(), window(256)), {0: layout()}, {"lora": "x"})
    assert [(g.layers, g.block_bytes, g.window_tokens) for g in spec.groups] == [
        (("layer.0",), (1024,), None),
        (("layer.1",), (2048,), 256),
    ]
    assert (spec.backend, spec.isa, spec.dtype, spec.block_tokens, spec.ranks) == ("CPU_ATTN", "vec", "float32", 128, 1)
    assert spec.extra["lora"] == "x"
    assert spec.model == "org/name"


def test_the_configuration_as_run_is_part_of_the_identity() -> None:
    one = model_spec.build_spec(engine(), caches(full()), {0: layout()}, {})
    other = model_spec.build_spec(engine(rope="yarn"), caches(full()), {0: layout()}, {})
    assert one.extra["hf_config"] != other.extra["hf_config"]
    short = model_spec.build_spec(engine(rope="longrope", max_model_len=10), caches(full()), {0: layout()}, {})
    long = model_spec.build_spec(engine(rope="longrope", max_model_len=99), caches(full()), {0: layout()}, {})
    assert short.extra["hf_config"] != long.extra["hf_config"]


def test_the_way_from_an_image_to_pixels_is_part_of_the_identity() -> None:
    text, other = (engine(multimodal_config=c) for c in (None, MultiModalConfig(mm_processor_kwargs={"resample": 0})))
    specs = [model_spec.build_spec(config, caches(full()), {0: layout()}, {}) for config in (text, other)]
    assert specs[0].extra["media"] == "" != specs[1].extra["media"]


def test_ranks_must_be_complete_and_agree() -> None:
    two = engine(tensor_parallel_size=2)
    with pytest.raises(LayoutError, match="2 tensor-parallel ranks"):
        model_spec.build_spec(two, caches(full()), {0: layout()}, {})
    with pytest.raises(LayoutError, match="rank 1"):
        model_spec.build_spec(two, caches(full()), {0: layout(), 1: layout(isa="amx")}, {})
    with pytest.raises(LayoutError, match=r"no KV for the layers layer\.0"):
        model_spec.build_spec(engine(), caches(full()), {0: layout(block_bytes={})}, {})


def test_blocks_cut_into_kernel_blocks() -> None:
    tensor = torch.arange(48).reshape(12, 2, 2)
    assert by_block(tensor, 12) is tensor
    view = by_block(tensor, 4)
    assert view.shape == (4, 3, 2, 2)
    assert view.data_ptr() == tensor.data_ptr()
    assert view[1].flatten().tolist() == list(range(12, 24))
    with pytest.raises(ValueError, match="does not hold 5 blocks"):
        by_block(tensor, 5)
