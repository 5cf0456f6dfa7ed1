"""Scenarios with images, under the model `idefics3`: prompts that differ in images only. Run by `scenarios.py`."""

from pathlib import Path
from typing import Any

import numpy as np
from engines import Engine, engine, tokens
from PIL import Image

from vllm import SamplingParams, TokensPrompt

PLACE = 1024
"""The token that stands for an image in a prompt."""
IMAGE = [1025, 1026, *[PLACE] * 225, 1025]
"""What vLLM puts in its place: 228 tokens."""
BEFORE, BETWEEN, AFTER = tokens(11, 200), tokens(12, 100), tokens(13, 300)


def picture(name: str) -> Image.Image:
    """Random coloured squares, of another size than the model wants."""
    squares = np.random.default_rng(ord(name)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((160, 120), Image.Resampling.BICUBIC)


def prompt(*parts: "list[int] | str") -> TokensPrompt:
    """Of token ids and names of pictures, in this order."""
    ids = [i for part in parts for i in ([PLACE] if isinstance(part, str) else part)]
    pictures = [picture(part) for part in parts if isinstance(part, str)]
    return TokensPrompt(prompt_token_ids=ids, **({"multi_modal_data": {"image": pictures}} if pictures else {}))


PROMPTS = {
    "a": prompt(BEFORE, "a", AFTER),
    "b": prompt(BEFORE, "b", AFTER),
    "no image": prompt(BEFORE, IMAGE, AFTER),  # the same token ids
    "text": prompt(BEFORE, AFTER),
    "moved": prompt(BEFORE[1:], "a", AFTER),
    "a first": prompt("a", AFTER),
    "b first": prompt("b", AFTER),
    "a, b": prompt(BEFORE, "a", BETWEEN, "b", AFTER),
    "a, c": prompt(BEFORE, "a", BETWEEN, "c", AFTER),
    "b, a": prompt(BEFORE, "b", BETWEEN, "a", AFTER),
    "a last": prompt(BEFORE, "a"),
}


def plain_images(models: Path) -> dict[str, Any]:
    """vLLM without kvcore."""
    made = Engine(str(models / "idefics3"), None, enable_prefix_caching=False)
    texts, _ = made.run(list(PROMPTS.values()))
    made.close()
    return dict(zip(PROMPTS, texts, strict=True))


def images(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Each prompt after all before it, all of them at once, a hit that begins inside an image, loads that fail.

    Before each, vLLM forgets the KV and what it made of the images.
    """
    out: dict[str, Any] = {}
    cold = {}
    with engine(str(models / "idefics3"), extra or {}) as e:
        for name, each in PROMPTS.items():
            cold[name] = e.one(each)
            _forget(e)
        out["cold"], out["cold_cached"] = _by_name([text for text, _ in cold.values()], [n for _, n in cold.values()])
        out["hot"], out["hot_cached"] = _by_name(*e.run(list(PROMPTS.values())))
        _forget(e)
        _, out["own_cached"] = e.one(PROMPTS["a last"])
        out["beyond"], out["beyond_cached"] = e.one(PROMPTS["a"])
        _forget(e)
        cache = e.half.engine
        retrieve = cache.retrieve

        def stolen(*args: Any) -> Any:
            copies = retrieve(*args)
            cache.l1.arena.bump([c.slot for c in copies[2:]])
            return copies

        cache.retrieve = stolen
        out["stolen"], _ = e.one(PROMPTS["a, b"])
        out["failures"] = e.stat("kvcore_load_failures_total")
        cache.retrieve = retrieve
        _forget(e)
        out["preempted"], out["preempted_cached"] = _preempted(e, PROMPTS["a, b"])
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def _preempted(made: Engine, each: TokensPrompt) -> tuple[Any, int]:
    """The text of a request that is preempted after its first tokens, when nothing of what it needs is left."""
    vllm, outputs = made.llm.llm_engine, []
    vllm.add_request("preempted", each, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0))
    while not outputs:
        outputs = vllm.step()
    assert made.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    vllm.reset_encoder_cache()
    while not outputs[0].finished:
        outputs = vllm.step() or outputs
    (text,) = outputs[0].outputs
    return (list(text.token_ids), text.cumulative_logprob), outputs[0].num_cached_tokens


def images_from_disk(models: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """A new engine, with nothing in memory."""
    out: dict[str, Any] = {}
    with engine(str(models / "idefics3"), extra) as e:
        out["first"], _ = e.one(PROMPTS["a, b"])
        out["first_sources"] = {
            m.labels["source"]: m.value
            for m in e.llm.get_metrics()
            if m.name == "vllm:prompt_tokens_cached_by_source" and m.value
        }
        out["texts"], out["cached"] = _by_name(*e.run(list(PROMPTS.values())))
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


def image_settings(models: Path) -> dict[str, Any]:
    """The same image under engines that make other pixels of it (0: the nearest one), with one storage."""
    shared = {"kvcore.l2": [{"storage": {"plugin": "slow"}}]}
    other = {"mm_processor_kwargs": {"resample": 0}}
    out: dict[str, Any] = {}
    for name, extra, settings in (
        ("plain", None, {}), ("plain_other", None, other),
        ("cold", shared, {}), ("other", shared, other), ("hot", shared, {}),
    ):  # fmt: skip
        made = Engine(str(models / "idefics3"), extra, **settings)
        out[name], out[name + "_cached"] = made.one(PROMPTS["a"])
        made.close()
    return out


def images_without_names(models: Path) -> str:
    """vLLM set so that it numbers images instead of hashing them; the error's text."""
    try:
        Engine(str(models / "idefics3"), {}, mm_processor_cache_gb=0, enable_prefix_caching=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def _forget(made: Engine) -> None:
    made.forget()
    made.llm.llm_engine.reset_encoder_cache()


def _by_name(texts: "list[Any]", cached: list[int]) -> tuple[dict[str, Any], dict[str, int]]:
    return dict(zip(PROMPTS, texts, strict=True)), dict(zip(PROMPTS, cached, strict=True))
