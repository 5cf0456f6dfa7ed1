"""Comparing what engines answer: token ids exactly, log probabilities as closely as float32 allows where a prompt is
computed in other pieces."""

from typing import Any

LOGPROB_TOLERANCE = 5e-3
LOADED = [192, 48, 64]
"""Tokens of the prompts that can come from the storage, and `PAGES`: see `engines.py`."""
NOTHING = [0, 0, 0]
PAGES = 20


def same(texts: Any, reference: Any) -> bool:
    """Are these the same texts? Each is a list of token ids and a sum of log probabilities."""
    return len(texts) == len(reference) and all(
        ids == ids_there and abs(sum_ - sum_there) <= LOGPROB_TOLERANCE
        for (ids, sum_), (ids_there, sum_there) in zip(texts, reference, strict=True)
    )
