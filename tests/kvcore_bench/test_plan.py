"""`kvcore plan`: known models weigh what is known of them, and the lengths are those at which the times cross."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.config import load_config
from kvcore.plugins import Registry
from kvcore_bench.plan import costs
from kvcore_bench.plan.advice import REQUIRED
from kvcore_bench.plan.costs import Store
from kvcore_bench.plan.model import read_model
from kvcore_bench.plan.speeds import GPUS, parse_number, parse_store

KIB = 1024
BF16 = {"torch_dtype": "bfloat16"}
LLAMA_8B = {
    **BF16, "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
DEEPSEEK_V3 = {
    **BF16, "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
}  # fmt: skip
QWEN25_7B = {
    **BF16, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "max_position_embeddings": 32768, "sliding_window": 131072,
    "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
QWEN3_8B = {
    **BF16, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    **BF16, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960,
}  # fmt: skip
MISTRAL_7B = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
MIXTRAL = {
    **MISTRAL_7B,
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA2_9B = {
    **BF16, "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "sliding_window": 4096,
}  # fmt: skip
GEMMA3_27B = {
    **BF16, "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}  # fmt: skip
GEMMA3_4B = {
    **BF16, "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240,
        "sliding_window": 1024,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
FALCON_7B = {
    **BF16, "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "multi_query": True,
}  # fmt: skip
GEMMA3N = {
    **BF16, "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 8192, "sliding_window": 512,
        "num_kv_shared_layers": 10, "max_position_embeddings": 32768,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    },
}  # fmt: skip


def weighed(config: dict[str, Any], tp: int = 1, dtype: str = "auto", block: int = 16) -> costs.Kv:
    return costs.weigh(read_model(config, dtype), tp, block, "auto", 1 << 20)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (LLAMA_8B, 128 * KIB),
        (LLAMA_70B, 320 * KIB),
        (DEEPSEEK_V3, 61 * 576 * 2),
        (QWEN25_7B, 56 * KIB),
        (QWEN3_8B, 144 * KIB),
        (QWEN3_30B_A3B, 96 * KIB),
        (MISTRAL_7B, 128 * KIB),
        (GEMMA2_9B, 336 * KIB),
        (GEMMA3_27B, 496 * KIB),
        (GEMMA3_4B, 34 * 2 * 4 * 256 * 2),
        (GPT_OSS_20B, 48 * KIB),
        (GPT2, 36 * KIB),
        (FALCON_7B, 8 * KIB),
        (GEMMA3N, 20 * 2 * 2 * 256 * 2),
    ],
)
def test_a_token_of_known_models(config: dict[str, Any], token_bytes: int) -> None:
    kv = weighed(config)
    assert kv.token_bytes == kv.once_bytes == token_bytes


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA_8B, {None: 32}),
        (QWEN25_7B, {None: 28}),
        ({**QWEN25_7B, "use_sliding_window": True, "max_window_layers": 20}, {None: 20, 131072: 8}),
        (MISTRAL_7B, {4096: 32}),
        (GEMMA2_9B, {4096: 21, None: 21}),
        (GEMMA3_27B, {1024: 52, None: 10}),
        (GEMMA3_4B, {1024: 29, None: 5}),
        (GPT_OSS_20B, {128: 12, None: 12}),
        ({k: v for k, v in GPT_OSS_20B.items() if k != "layer_types"}, {128: 12, None: 12}),
        (GEMMA3N, {512: 16, None: 4}),
    ],
)
def test_which_layers_have_a_window(config: dict[str, Any], windows: dict[int | None, int]) -> None:
    found: dict[int | None, int] = {}
    for layer in read_model(config).layers:
        found[layer.window] = found.get(layer.window, 0) + 1
    assert found == windows


def test_chunks_are_as_the_cache_makes_them() -> None:
    assert (weighed(LLAMA_8B).chunk_tokens, weighed(LLAMA_8B, block=128).chunk_tokens) == (16, 128)
    assert weighed(QWEN25_7B).chunk_tokens == 32  # 16 are less than 1 MiB
    assert weighed(GPT2).chunk_tokens == 32
    assert weighed({**GPT2, "n_layer": 1}).chunk_tokens == 256  # no more than that
    (group,) = weighed(LLAMA_8B).groups
    assert group.object_bytes == 2 << 20


def test_the_layers_of_hybrid_models_are_grouped_as_by_vllm() -> None:
    assert [g.layers for g in weighed(GPT_OSS_20B).groups] == [12, 12]
    groups = weighed(GEMMA3_27B).groups
    assert sorted((g.layers for g in groups if g.window), reverse=True) == [9, 9, 9, 9, 8, 8]
    assert [g.layers for g in groups if g.window is None] == [10]
    half_more = {
        **GPT_OSS_20B,
        "num_hidden_layers": 25,
        "layer_types": ["sliding_attention"] * 12 + ["full_attention"] * 13,
    }
    assert [g.layers for g in weighed(half_more).groups] == [12, 13]


def test_tensor_parallel_ranks_hold_what_they_must() -> None:
    assert weighed(LLAMA_8B, tp=8).token_bytes == 128 * KIB
    assert weighed(LLAMA_8B, tp=16).token_bytes == 256 * KIB  # two ranks for each head
    assert weighed(DEEPSEEK_V3, tp=8).token_bytes == 8 * 61 * 576 * 2
    assert weighed(DEEPSEEK_V3, tp=8).once_bytes == 61 * 576 * 2


def test_the_dtype_of_the_kv() -> None:
    assert weighed(LLAMA_8B, dtype="fp8").token_bytes == 64 * KIB
    assert weighed(LLAMA_8B, dtype="fp8_e4m3").token_bytes == 64 * KIB
    assert weighed(LLAMA_8B, dtype="fp32").token_bytes == 256 * KIB
    assert weighed({**LLAMA_8B, "torch_dtype": "float32"}).token_bytes == 256 * KIB
    assert "bfloat16 is assumed" in " ".join(read_model(GPT2).notes)


def test_of_a_window_only_its_end_is_loaded_and_all_is_stored() -> None:
    kv = weighed(MISTRAL_7B)
    (group,) = kv.groups
    assert group.window_tokens == 4096 + 16
    assert kv.loaded_bytes(2048) == 2048 * 128 * KIB
    assert kv.loaded_bytes(32768) == (4096 + 16) * 128 * KIB
    assert kv.stored_bytes(32768) == 32768 * 128 * KIB


# -- work --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA_8B, 8.03 - 2 * 128256 * 4096 / 1e9),  # published, less embeddings and output layer
        (LLAMA_70B, 70.55 - 2 * 128256 * 8192 / 1e9),
        (QWEN25_7B, 6.53),  # published without embeddings
        (QWEN3_8B, 6.95),
        (MIXTRAL, 12.88 - 2 * 32000 * 4096 / 1e9),
        (QWEN3_30B_A3B, 3.35 - 2 * 151936 * 2048 / 1e9),
        (DEEPSEEK_V3, 37.5 - 2 * 129280 * 7168 / 1e9),
    ],
)
def test_active_parameters_of_known_models(config: dict[str, Any], billions: float) -> None:
    assert read_model(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_work_of_a_prompt_is_that_of_its_matrices_and_of_its_pairs() -> None:
    model = read_model(LLAMA_8B)
    seconds = costs.by_flops(model, 1e15)
    n = 32768
    pairs = 32 * n * n / 2
    assert seconds(n) * 1e15 == pytest.approx(2 * model.parameters * n + 4 * 32 * 128 * pairs)
    windowed = costs.by_flops(read_model(MISTRAL_7B), 1e15)
    inside, behind = 4096 * 4096 / 2, (n - 4096) * 4096
    assert windowed(n) * 1e15 == pytest.approx(2 * model.parameters * n + 4 * 32 * 128 * 32 * (inside + behind))


@given(
    st.sampled_from([LLAMA_8B, MISTRAL_7B, GEMMA3_4B, DEEPSEEK_V3, GPT2]),
    st.floats(1e7, 1e11), st.floats(0, 1), st.floats(1e11, 1e16) | st.floats(-1e6, -1),
)  # fmt: skip
def test_loading_pays_from_the_break_even_on_and_not_before(
    config: dict[str, Any], bytes_per_s: float, latency_s: float, speed: float
) -> None:
    model, kv = read_model(config), weighed(config)
    prefill = costs.by_flops(model, speed) if speed > 0 else costs.at_speed(-speed)
    store = Store("t", bytes_per_s, latency_s)
    most = 400 * kv.chunk_tokens
    found = costs.break_even(kv, prefill, store, most)
    pays = [kv.load_seconds(n, store) <= prefill(n) for n in range(kv.chunk_tokens, most + 1, kv.chunk_tokens)]
    first = pays.index(True) if True in pays else None
    assert found == (None if first is None else (first + 1) * kv.chunk_tokens)
    assert first is None or all(pays[first:])


# -- words -------------------------------------------------------------------------------------------------------------


def test_tiers_and_numbers_as_they_are_written() -> None:
    assert parse_store("disk=2.5,4ms") == Store("disk", 2.5e9, 0.004)
    assert parse_store("s3=400MB/s,20ms") == Store("s3", 4e8, 0.02)
    assert parse_store("far=10Gbit/s, 1ms") == Store("far", 1.25e9, 1e-3)
    assert parse_number("--flops", "989T", "FLOP/s") == 989e12
    assert parse_number("--prefill", "12k tokens/s", "tokens/s") == 12000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many': a whole number above 0"),
        ({"num_hidden_layers": 10**9}, "at most 10000 layers"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7: it must divide the 32 query heads"),
        ({"num_key_value_heads": [8] * 32}, "num_key_value_heads is [8, 8"),
        ({"hidden_size": 4095}, "head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries: a list with one entry for each of 32"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types[0] is 'linear_attention': kvcore caches full_"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing, and layer_types[0]"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: chunked attention is not cached"),
        ({"layers_block_type": ["mamba"] * 32}, "layers_block_type: some layers keep a state"),
        ({"torch_dtype": "int4"}, "dtype is 'int4': choose one of float32, bfloat16"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as e:
        read_model({**LLAMA_8B, **change})
    assert words in str(e.value)
    nested = {"text_config": {**LLAMA_8B, **change}}
    with pytest.raises(ConfigError, match=r"text_config\."):
        read_model(nested)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("KVCORE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA_8B))
    return "llama"


def planned(capsys: Any, *args: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", "--json", *args]) == status
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_the_whole_answer(llama: str, capsys: Any) -> None:
    plan = planned(
        capsys, "--model", llama, "--tier", "disk=2.5,100us", "--tier", "memory=10,50us", "--prefill", "10k",
        "--tokens", "1M",
    )  # fmt: skip
    assert list(plan) == [
        "model", "kv", "prefill", "tiers", "working_set", "settings", "reasons", "notes",
    ]  # fmt: skip
    assert plan["kv"]["token_bytes"] == 128 * KIB
    assert plan["kv"] == planned(capsys, llama)["kv"], "the model may stand without its option"
    assert plan["prefill"]["seconds"]["8192"] == pytest.approx(0.8192)
    disk, memory = plan["tiers"]
    assert disk["load_seconds"]["8192"] == pytest.approx(1e-4 + 8192 * 128 * KIB / 2.5e9)
    assert disk["break_even_tokens"] == 16  # 0.94 ms against 1.6
    assert memory["break_even_tokens"] == 16
    assert plan["working_set"] == {"tokens": 1_000_000, "bytes": 1_000_000 * 128 * KIB}
    assert [t["storage"]["plugin"] for t in plan["settings"]["l2"]] == ["memory", "disk"]


def test_what_it_says_to_write_is_a_configuration(llama: str, capsys: Any, tmp_path: Path) -> None:
    speeds = ("--tier", "disk=0.4,20ms", "--tier", "memory=10,50us", "--prefill", "2k", "--tokens", "3M")
    assert main(["plan", "--model", llama, *speeds]) == 0
    out = capsys.readouterr().out
    text = out.split("kvcore.yaml\n")[1]
    path = tmp_path / "kvcore.yaml"
    path.write_text(text)
    config = load_config(str(path), env={}, registry=Registry())
    assert [t.storage.plugin for t in config.l2] == ["memory", "disk"]
    assert int(config.l2[1].storage.options.capacity) >= 3_000_000 * 128 * KIB
    assert config.l1.size == 16 << 30
    assert config.lookup_timeout > 32768 * 128 * KIB / 0.4e9
    assert "PAYS FROM" in out
    assert "3,000,000 tokens takes" in out


def test_a_tier_slower_than_computing_is_left_out(llama: str, capsys: Any) -> None:
    plan = planned(capsys, "--model", llama, "--tier", "disk=0.1,1ms", "--gpu", "h100")
    assert plan["tiers"][0]["break_even_tokens"] is None
    assert plan["settings"]["l2"] == []
    assert plan["reasons"]["l2"] == "without disk: computing is faster"
    assert "989 TFLOP/s" in plan["prefill"]["from"]


def test_without_speeds_it_says_what_to_give(llama: str, capsys: Any) -> None:
    assert main(["plan", "--model", f"{llama}/config.json"]) == 0
    out = capsys.readouterr().out
    assert "--prefill" in out
    assert "--tier NAME=GB/s,LATENCY" in out
    assert "l2" not in out.split("kvcore.yaml\n")[1]


def test_configured_tiers_are_measured_and_nothing_is_left(llama: str, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "kvcore.yaml").write_text(
        "l2:\n  - storage: memory\n  - storage: {plugin: disk, path: store, capacity: 1GiB}\n    name: here\n"
        "  - {name: far, storage: memory}\n"
    )
    plan = planned(capsys, "--model", llama, "--config", "kvcore.yaml", "--tier", "far=1,2ms", "--prefill", "100")
    memory, here, far = plan["tiers"]
    assert [t["name"] for t in plan["tiers"]] == ["memory", "here", "far"]
    assert (far["bytes_per_second"], far["latency_seconds"]) == (1e9, 0.002)
    assert min(memory["bytes_per_second"], here["bytes_per_second"]) > 1e7
    assert memory["break_even_tokens"] is not None
    assert "l2" not in plan["settings"]
    assert not [f for f in (tmp_path / "store").rglob("*") if f.is_file() and f.stat().st_size > 100_000]


def test_a_tier_that_cannot_be_measured_is_left_out(llama: str, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "kvcore.yaml").write_text(
        "l2:\n  - storage: memory\n  - {name: bad, storage: {plugin: faulty, storage: memory, error_rate: 1}}\n"
    )
    assert main(["plan", "--json", "--model", llama, "--config", "kvcore.yaml"]) == 1
    out, err = capsys.readouterr()
    assert [t["name"] for t in json.loads(out)["tiers"]] == ["memory"]
    assert "tier bad" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nowhere"], "nowhere is not there, and the hub"),
        (["nowhere"], "MODEL nowhere: nowhere is not there, and the hub"),
        (["--model", "bad.json"], "bad.json is no config.json"),
        (["--model", "list.json"], "list.json is no config.json: it holds no mapping"),
        (["--model", "llama", "--tp", "3"], "--tp 3: it must divide the model's 32 attention heads"),
        (["--model", "llama", "--tp", "0"], "--tp 0: it must divide"),
        (["--model", "llama", "--dtype", "int8"], "--dtype is 'int8': choose one of"),
        (["--model", "llama", "--block-size", "0"], "--block-size 0"),
        (["--model", "llama", "--tier", "disk"], "--tier 'disk': write NAME=BANDWIDTH,LATENCY"),
        (["--model", "llama", "--tier", "disk=fast,1ms"], "--tier 'disk=fast,1ms': write NAME="),
        (["--model", "llama", "--tier", "disk=1,1"], "'1' is not a duration: write a number and a unit"),
        (["--model", "llama", "--tier", "disk=0,1ms"], "a tier of no bandwidth"),
        (["--model", "llama", "--tier", "a=1,1ms", "--tier", "a=1,1ms"], "--tier a is given twice"),
        (["--model", "llama", "--prefill", "none"], "--prefill 'none': write a number above 0"),
        (["--model", "llama", "--tokens", "0"], "--tokens '0': write a number above 0"),
        (["--model", "llama", "--gpu", "abacus"], f"--gpu 'abacus': known are {', '.join(GPUS)}"),
        (["--model", "llama", "--gpu", "h100", "--mfu", "2"], "--mfu 2: write a share"),
        (["--model", "llama", "--set", "l1.size=1GiB"], "--set changes what --config reads"),
    ],
)
def test_errors_name_the_thing_and_what_is_allowed(
    llama: str, capsys: Any, tmp_path: Path, args: list[str], words: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert main(["plan", *args]) == 1
    assert words in capsys.readouterr().err


def test_what_a_storage_needs_is_there_to_be_filled_in(llama: str, capsys: Any, tmp_path: Path) -> None:
    registry = Registry()
    for info in registry.available("storage"):
        if info.distribution.startswith("kvcore-") and info.status == "ready":
            model = registry.config_model("storage", info.name)
            needed = () if model is None else tuple(n for n, f in model.model_fields.items() if f.is_required())
            assert needed == REQUIRED.get(info.name, ()), info.name
    tiers = ["--tier", "disk=6,100us", "--tier", "s3=2,20ms"]
    for more in ([], ["--tokens", "2M"]):
        assert main(["plan", "--model", llama, *tiers, *more]) == 0
        text = capsys.readouterr().out.partition("kvcore.yaml\n")[2]
        file = tmp_path / "kvcore.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"l2\[1\]\.storage\.bucket: .*BUCKET"):  # not as it stands
            load_config(file, env={}, registry=registry)
        file.write_text(text.replace("bucket: BUCKET", "bucket: my-bucket"))
        assert load_config(file, env={}, registry=registry).l2[1].name == "s3"


def test_the_page_shows_what_is_printed(llama: str, capsys: Any) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text()
    (command,) = re.findall(r"^    kvcore (plan .*)$", page, re.M)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.S | re.M)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown
    for flag in re.findall(r"^\| `(--[a-z-]+)", page, re.M):
        assert main(["plan", "--help"]) == 0
        assert flag in capsys.readouterr().out


def test_a_model_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a model which an engine of this user has downloaded."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "team/llama"]) == 1
    assert "the hub's cache of this machine and user has no model of that name" in capsys.readouterr().err
    repository = tmp_path / "hub" / "models--team--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", "team/llama", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["token_bytes"] == 128 * KIB
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("kvcore.cli.kit.hub.find_spec", lambda name: None)
    assert main(["plan", "team/llama"]) == 1
    assert "names on the hub need huggingface_hub, which is not installed here" in capsys.readouterr().err
