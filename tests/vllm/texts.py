"""Comparing texts: token ids exactly, log probabilities as closely as float32 allows in batches of another shape."""

from typing import Any

LOGPROB_TOLERANCE = 5e-3


def same(result: Any, reference: Any) -> bool:
    """Is this text (or list of texts) the same? A text is a list of token ids and a sum of log probabilities."""
    if isinstance(reference, float):
        return abs(result - reference) <= LOGPROB_TOLERANCE
    if isinstance(reference, list):
        return len(result) == len(reference) and all(map(same, result, reference))
    return bool(result == reference)
