"""Images under real vLLM with kvcore. All text is compared to vLLM without kvcore, in float32."""

import itertools
import json
from typing import Any

import pytest
from texts import same

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ASYNC = '{"extra": {"kvcore.load": "async", "kvcore.save": "async"}}'
TOKENS = '{"extra": {"kvcore.keys": "tokens"}}'
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}

# A block is 128 tokens, an image 228. "a" is 200 tokens, an image, 300 tokens: its image begins in the second block.
# What a prompt finds of all those before it: whole blocks up to the one in which the first other image begins.
COLD = {
    "a": 0,
    "b": 128,
    "no image": 128,
    "text": 128,
    "moved": 0,
    "a first": 0,
    "b first": 0,
    "a, b": 384,
    "a, c": 512,  # the second image begins after 528 tokens
    "b, a": 384,
    "a last": 384,
}
HOT = {
    "a": 640,
    "b": 640,
    "no image": 640,
    "text": 384,
    "moved": 640,
    "a first": 512,
    "b first": 512,
    "a, b": 1024,
    "a, c": 1024,
    "b, a": 1024,
    "a last": 384,
}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    disk = {"storage": {"plugin": "disk", "path": str(tmp_path_factory.mktemp("images"))}}
    return json.dumps({"extra": {"kvcore.load": "sync", "kvcore.save": "sync", "kvcore.l2": [disk]}})


@pytest.fixture(scope="module")
def results(run_child: Any, on_disk: str) -> Any:
    return run_child(
        "plain_images",
        *(f"images:{mode}" for mode in (on_disk, ASYNC, TOKENS)),
        "image_settings",
        "images_without_names",  # last: a refused engine leaves vLLM's state in the process
    )


def same_texts(texts: dict[str, Any], plain: dict[str, Any]) -> None:
    assert texts.keys() == plain.keys()
    for name, text in texts.items():
        assert same(text, plain[name]), name


def test_every_image_changes_the_text(results: Any) -> None:
    for one, other in itertools.combinations(results["plain_images"].items(), 2):
        assert not same(one[1], other[1]), (one, other)


@pytest.mark.parametrize("mode", ["on_disk", ASYNC, TOKENS], ids=["sync", "async", "keys-from-tokens"])
def test_images(results: Any, on_disk: str, mode: str) -> None:
    plain, result = results["plain_images"], results[f"images:{on_disk if mode == 'on_disk' else mode}"]
    for phase in ("cold", "hot"):
        same_texts(result[phase], plain)
    assert result["cold_cached"] == COLD
    assert result["hot_cached"] == HOT
    assert (result["own_cached"], result["beyond_cached"]) == (384, 640)
    assert same(result["beyond"], plain["a"])
    assert same(result["stolen"], plain["a, b"])
    assert result["failures"] > 0
    assert same(result["preempted"], plain["a, b"])
    assert result["preempted_cached"] == 1024  # when it first began
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_images_after_a_restart(results: Any, run_child: Any, on_disk: str) -> None:
    name = f"images_from_disk:{on_disk}"
    result = run_child(name)[name]
    assert same(result["first"], results["plain_images"]["a, b"])
    assert result["first_sources"] == {"disk": 1024}
    same_texts(result["texts"], results["plain_images"])
    assert result["cached"] == HOT
    assert result["leaks"] == NO_LEAKS
    assert result["faults"] == {}


def test_other_pixels_of_the_same_image_separate(results: Any) -> None:
    result = results["image_settings"]
    assert not same(result["plain"], result["plain_other"])
    for name, reference, cached in (("cold", "plain", 0), ("other", "plain_other", 0), ("hot", "plain", 640)):
        assert same(result[name], result[reference]), name
        assert result[f"{name}_cached"] == cached, name


def test_images_without_names_are_refused(results: Any) -> None:
    assert "vLLM names an image by a counter" in results["images_without_names"]
