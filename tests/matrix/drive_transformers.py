"""transformers' `generate()` over every configuration file, see `drive.py`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drive
import torch
from transformers_small import cached, gqa, plain, tokens

from kvcore_transformers import PrefixCache

PROMPTS = [tokens(400), tokens(310, seed=1), tokens(130, seed=2)]


@contextmanager
def opened(models: Path) -> Iterator[tuple[Any, dict[str, drive.Serve]]]:
    """A small random model, the same in every process."""
    torch.set_num_threads(1)
    model = gqa()

    def serve(file: Path) -> drive.Cell:
        outputs, reused, said = [], 0, set()
        with PrefixCache(model, str(file)) as cache:
            for prompt in PROMPTS:
                outputs.append(cached(cache, prompt).tolist())
                reused += cache.last.reused_tokens
                said.add(cache.last.refused)
            assert cache.drain(drive.PATIENCE_S) == 0
            numbers = cache.stats()
        return drive.cell(outputs, sum(p.shape[1] for p in PROMPTS), reused, numbers, sorted(said - {""}))

    yield [plain(model, prompt).tolist() for prompt in PROMPTS], {"transformers": serve}


if __name__ == "__main__":
    drive.main("transformers", opened)
