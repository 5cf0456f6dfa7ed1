"""Scenarios with images, under the model `idefics3`: prompts that differ in their images only. Run by `child.py`."""

from pathlib import Path
from typing import Any

import numpy as np
from engines import Engine, engine, tokens
from PIL import Image

from vllm import TokensPrompt

PLACE = 1024
"""The token that stands for an image in a prompt; vLLM puts the image's 228 tokens in its place."""
IMAGE = [1025, 1026, *[1024] * 225, 1025]
BEFORE, BETWEEN, AFTER = tokens(11, 200), tokens(12, 100), tokens(13, 300)


def picture(seed: int) -> Image.Image:
    """Random coloured squares, of another size than the model wants."""
    squares = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((160, 120), Image.Resampling.BICUBIC)


def prompt(*parts: "list[int] | str") -> TokensPrompt:
    """Of token ids and names of pictures, in this order."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, str):
            ids.append(PLACE)
            images.append(picture(ord(part)))
        else:
            ids += part
    return TokensPrompt(prompt_token_ids=ids, **({"multi_modal_data": {"image": images}} if images else {}))


PROMPTS = {
    "a": prompt(BEFORE, "a", AFTER),
    "b": prompt(BEFORE, "b", AFTER),
    # The same token ids, with nothing in the place of the image.
    "none": prompt(BEFORE, IMAGE, AFTER),
    "text": prompt(BEFORE, AFTER),
    "moved": prompt(BEFORE[1:], "a", AFTER),
    "first a": prompt("a", AFTER),
    "first b": prompt("b", AFTER),
    "a then b": prompt(BEFORE, "a", BETWEEN, "b", AFTER),
    "a then c": prompt(BEFORE, "a", BETWEEN, "c", AFTER),
    "b then a": prompt(BEFORE, "b", BETWEEN, "a", AFTER),
    "last": prompt(BEFORE, "a"),
}


def plain_images(models: Path) -> dict[str, Any]:
    """vLLM without kvcore."""
    made = Engine(str(models / "idefics3"), None, enable_prefix_caching=False)
    texts, _ = made.run(list(PROMPTS.values()))
    made.close()
    return dict(zip(PROMPTS, texts, strict=True))


def images(models: Path, extra: "dict[str, Any] | None" = None) -> dict[str, Any]:
    """Each prompt after all before it, vLLM's own cache emptied in between; then each once more."""
    out: dict[str, Any] = {"cold": {}, "cold_cached": {}, "hot": {}, "hot_cached": {}}
    with engine(str(models / "idefics3"), extra or {}) as e:
        for round_ in ("cold", "hot"):
            for name, each in PROMPTS.items():
                out[round_][name], out[f"{round_}_cached"][name] = e.one(each)
                e.forget()
        e.settle()
        out["leaks"], out["faults"] = e.leaks(), e.faults()
    return out


SLOW = {"kvcore.l2": [{"storage": {"plugin": "slow"}}]}


def by_counter(models: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("a", "b"):
        with engine(
            str(models / "idefics3"), SLOW, mm_processor_cache_gb=0, enable_prefix_caching=False
        ) as e:
            out[name], out[name + "_cached"] = e.one(PROMPTS[name])
    return out


def settings(models: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    other = {"mm_processor_kwargs": {"resample": 0}}
    for name, extra, kwargs in (("plain_other", None, other), ("usual", SLOW, {}), ("other", SLOW, other)):
        made = Engine(str(models / "idefics3"), extra, **kwargs)
        out[name], out[name + "_cached"] = made.one(PROMPTS["a"])
        made.close()
    return out
