"""A cache as an engine would use it, whose requests docs/explain.md explains, and a tokenizer of few words."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvcore.api import KeySource
from kvcore.engine import Asked, Engine, Space
from kvcore.service import open_engine
from kvcore.testing import chunks

MODEL = "qwen3"
SHARED = " ".join(f"Rule {i} : be kind and brief ." for i in range(15))
MONDAY = f"{SHARED} Today is Monday . What is the weather like ?"
TUESDAY = f"{SHARED} Today is Tuesday . What is the weather like ?"
CONFIG = "l1: {size: 8MiB}\nmin_object_size: 128KiB\nkeys: tokens\ninspect: {tokens: true}\nl2: []\n"


def write_model(folder: Path) -> Path:
    """A folder with a tokenizer of these texts' words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({*MONDAY.split(), *TUESDAY.split(), "[UNK]"})
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))  # type: ignore[call-arg]
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})
    )
    return folder


def ids(model: Path, text: str) -> list[int]:
    """Its tokens."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def serve(engine: Engine, space: Space, request: str, tokens: list[int]) -> None:
    """What an engine does for one request."""
    keys = tuple(space.hashes(KeySource(space.chunk_tokens, space.spec.block_tokens, tokens)))
    lookup = engine.lookup(space, keys, 0, Asked(request, len(tokens), tokens))
    assert lookup.wait(30)
    if lookup.poll():
        engine.retrieve(lookup, 0, [list(range(1000))])
    engine.release(lookup)
    plan = engine.reserve(space, keys, 0, len(keys), [list(range(1000))], request)
    engine.publish(plan.id)
    for _ in range(8):
        engine.prefilled(space, 100, 0.1)


@contextmanager
def demo(folder: Path) -> Iterator[Engine]:
    """The page's cache and its requests; its files are written into the folder."""
    model = write_model(folder / MODEL)
    (folder / "kvcore.yaml").write_text(CONFIG)
    (folder / "monday.txt").write_text(MONDAY)
    (folder / "tuesday.txt").write_text(TUESDAY)
    engine = open_engine(str(folder / "kvcore.yaml"), name="vllm")
    try:
        space = engine.register(replace(chunks.spec(), model=MODEL))
        serve(engine, space, "chatcmpl-81-0", ids(model, MONDAY))
        serve(engine, space, "chatcmpl-93-0", ids(model, TUESDAY))
        yield engine
    finally:
        engine.close()
