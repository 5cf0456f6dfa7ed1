"""kvcore under real vLLM, without faults. All text is compared to vLLM without kvcore, in float32."""

from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SYNC = '{"extra": {"kvcore.load": "sync", "kvcore.save": "sync"}}'
ASYNC = '{"extra": {"kvcore.load": "async", "kvcore.save": "async"}}'
MIXED = '{"extra": {"kvcore.load": "async", "kvcore.save": "sync", "kvcore.chunk_tokens": 256}}'
TOKENS = '{"extra": {"kvcore.keys": "tokens"}}'
SALTS_TOKENS = '{"tokens_kept": true, "extra": {"kvcore.keys": "tokens"}}'
PROMPT_ONLY = '{"extra": {"kvcore.save_decode": false}}'
SWA = '{"model": "swa"}'
SWA_ASYNC = '{"model": "swa", "extra": {"kvcore.save": "async", "kvcore.chunk_tokens": 256}}'
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}


@pytest.fixture(scope="module")
def results(run_child: Any) -> Any:
    return run_child(
        "plain",
        *(f"hot:{mode}" for mode in (SYNC, ASYNC, MIXED, TOKENS, PROMPT_ONLY)),
        *(f"many:{mode}" for mode in (SYNC, ASYNC)),
        *(f"aborts:{mode}" for mode in (SYNC, ASYNC)),
    )


@pytest.fixture(scope="module")
def hybrid(run_child: Any) -> Any:
    return run_child(
        f"plain:{SWA}",
        *(f"hot:{mode}" for mode in (SWA, SWA_ASYNC)),
        *(f"many:{mode}" for mode in (SWA, SWA_ASYNC)),
        f"aborts:{SWA_ASYNC}",
    )


def same_text(result: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("cold", "own", "hot"):
        assert same(result[name], plain["prompts"]), name
    for name, reference in (
        ("long", "long"), ("beyond", "long"), ("reset", "long"),
        ("partial", "partial"), ("short", "short"), ("turn", "turn"),
    ):  # fmt: skip
        assert same(result[name], plain[reference]), name
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_hot_in_the_step(results: Any) -> None:
    result = results[f"hot:{SYNC}"]
    same_text(result, results["plain"])
    assert result["chunk_tokens"] == 128
    assert result["cold_cached"] == [0, 0, 0, 0]
    # A load inside the step leaves a token to compute, so of 512 tokens a block less is loaded.
    assert result["hot_cached"] == [512, 384, 0, 1408]
    assert result["partial_cached"] == 256
    assert result["beyond_cached"] == 1408
    assert result["reset_cached"] == 0


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async"])
def test_each_request_is_on_record(results: Any, mode: str) -> None:
    """Tokens, whole chunks, those that vLLM held itself, the answer, why it ends there, what was read and stored."""
    record = [tuple(entry) for entry in results[f"hot:{mode}"]["record"]]
    loaded = results[f"hot:{mode}"]["hot_cached"]
    assert record[:4] == [
        (549, 4, 0, 0, "absent", 0, 4, None),
        (512, 4, 0, 0, "absent", 0, 4, None),
        (60, 0, 0, 0, "", 0, 0, None),  # shorter than a chunk
        (1500, 11, 0, 0, "absent", 0, 11, None),
    ]
    assert record[7] == (1500, 11, 11, 11, "", 0, 0, None)  # vLLM's own hit
    assert [entry[:5] for entry in record[8:12]] == [
        (n, c, 0, c, "") for n, c in ((549, 4), (512, 4), (60, 0), (1500, 11))
    ]
    assert [entry[5] for entry in record[8:12]] == loaded
    assert record[13] == (500, 3, 0, 2, "absent", 256, 2, None)


def test_hot_beside_the_step(results: Any) -> None:
    result = results[f"hot:{ASYNC}"]
    same_text(result, results["plain"])
    assert result["hot_cached"] == [512, 512, 0, 1408]
    assert result["partial_cached"] == 256
    assert result["beyond_cached"] == 1408
    assert result["reset_cached"] == 0


def test_chunks_of_two_blocks(results: Any) -> None:
    result = results[f"hot:{MIXED}"]
    same_text(result, results["plain"])
    assert result["chunk_tokens"] == 256
    assert result["hot_cached"] == [512, 512, 0, 1280]
    assert result["partial_cached"] == 256
    assert result["beyond_cached"] == 1280


def test_keys_from_tokens(results: Any) -> None:
    result = results[f"hot:{TOKENS}"]
    same_text(result, results["plain"])
    assert result["hot_cached"] == [512, 384, 0, 1408]


def test_generated_tokens_are_kept(results: Any) -> None:
    assert results[f"hot:{SYNC}"]["turn_cached"] == 256


def test_generated_tokens_are_not_kept_when_switched_off(results: Any) -> None:
    result = results[f"hot:{PROMPT_ONLY}"]
    same_text(result, results["plain"])
    assert result["turn_cached"] == 128


def test_numbers_in_vllms_metrics(results: Any) -> None:
    metrics = results[f"hot:{SYNC}"]["metrics"]
    assert metrics["vllm:external_prefix_cache_hits[]"] > 0
    assert metrics["vllm:prompt_tokens_cached_by_source['host']"] > 0
    assert metrics["vllm:kvcore_load_bytes[]"] > 0
    assert metrics["vllm:kvcore_save_bytes[]"] > 0
    assert metrics["vllm:kvcore_l1_bytes['size']"] == 256 * 1024 * 1024


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async"])
def test_many_requests_with_preemptions(results: Any, mode: str) -> None:
    result = results[f"many:{mode}"]
    for texts in result["rounds"]:
        assert same(texts, results["plain"]["crowd"])
    assert result["preemptions"] > 0
    assert result["cached"][1] > result["cached"][0]
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async"])
def test_aborted_requests(results: Any, mode: str) -> None:
    result = results[f"aborts:{mode}"]
    assert same(result["long"], results["plain"]["long"])
    assert result["long_cached"] == 1408
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.mark.parametrize("mode", [SWA, SWA_ASYNC], ids=["default", "async-256"])
def test_sliding_window(hybrid: Any, mode: str) -> None:
    result = hybrid[f"hot:{mode}"]
    same_text(result, hybrid[f"plain:{SWA}"])
    assert result["hot_cached"] == ([512, 384, 0, 1408] if mode == SWA else [512, 256, 0, 1280])
    assert result["beyond_cached"] > 1000


@pytest.mark.parametrize("mode", [SWA, SWA_ASYNC], ids=["default", "async-256"])
def test_sliding_window_with_preemptions(hybrid: Any, mode: str) -> None:
    result = hybrid[f"many:{mode}"]
    for texts in result["rounds"]:
        assert same(texts, hybrid[f"plain:{SWA}"]["crowd"])
    assert result["preemptions"] > 0
    assert result["cached"][1] > result["cached"][0]
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_sliding_window_with_aborts(hybrid: Any) -> None:
    result = hybrid[f"aborts:{SWA_ASYNC}"]
    assert same(result["long"], hybrid[f"plain:{SWA}"]["long"])
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


@pytest.fixture(scope="module")
def identities(run_child: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_child(
        "plain",
        "salts",
        f"salts:{SALTS_TOKENS}",
        f'adapters:{{"folder": "{tmp_path_factory.getbasetemp()}/adapters"}}',
        "inside_multi_connector",
    )


@pytest.mark.parametrize("scenario", ["salts", f"salts:{SALTS_TOKENS}"], ids=["engine", "tokens"])
def test_salts_separate(identities: Any, scenario: str) -> None:
    result = identities[scenario]
    for name, cached in (("a", 0), ("again", 1408), ("b", 0), ("none", 1408)):
        assert same(result[name], identities["plain"]["long"])
        assert result[f"{name}_cached"] == cached, name


@pytest.mark.parametrize("scenario", ["salts", f"salts:{SALTS_TOKENS}"], ids=["engine", "tokens"])
def test_hits_and_misses_are_explained(identities: Any, scenario: str) -> None:
    """Requests, whose other salt their tokens tell, or without these their marks; and prompts, whose chunks are named
    as vLLM names them."""
    result = identities[scenario]
    salted = ["other_namespace", 0, ["cache salt"]]
    kept = "tokens" in scenario
    assert result["explained"] == [
        [["never_stored", 0, []], None, 0, 1500],
        [salted, 1500 if kept else None, 0, 1500],
        [None, 1500 if kept else None, 1408, 1500],
        [salted, 1500 if kept else None, 0, 1500],
        [None, 1500 if kept else None, 1408, 1500],
        [["differs", 5, []], 700 if kept else None, 640, 1000],
        [["short_prompt", 0, []], None, 0, 100],
    ]
    assert result["prompt_salted"] == result["prompt_plain"] == [11, 11]
    assert result["named"] == 2
    assert any(result["kept"]) == kept


def test_adapters_of_one_name_separate(identities: Any) -> None:
    (result,) = (identities[name] for name in identities if name.startswith("adapters"))
    assert not same(result["plain_x"], result["plain_y"])
    for name, cached in (("cold_x", 0), ("cold_y", 0), ("hot_x", 1408)):
        assert same(result[name], result[f"plain_{name[-1]}"]), name
        assert result[f"{name}_cached"] == cached, name
        assert same(result[f"{name}_base"], identities["plain"]["long"]), name
        assert result[f"{name}_named"] == 2, name  # the adapter's chunks, and the base model's
    assert result["hot_x_base_cached"] == 1408
    assert [why for why, *_ in result["cold_x_explained"]] == [
        ["never_stored", 0, []],
        ["other_namespace", 0, ["lora"]],
    ]


def test_inside_vllms_multi_connector(identities: Any) -> None:
    result = identities["inside_multi_connector"]
    assert same(result["cold"], identities["plain"]["long"])
    assert same(result["hot"], identities["plain"]["long"])
    assert result["cached"] >= 1280
    assert result["recomputes"]  # the policy that counts is MultiConnector's, not that of its child
