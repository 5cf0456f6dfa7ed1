"""Which calls of `generate` can use the cache, and what they say of their rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvcore.api import KeySource
from kvcore.engine import Space
from kvcore_transformers import _compat
from kvcore_transformers.keys import BLOCK_TOKENS, block_hashes

_TENSORS = ("input_ids", "inputs", "attention_mask")


class Row(NamedTuple):
    """One sequence of a batch: `pad` columns of padding on the left, then its tokens."""

    pad: int
    tokens: list[int]

    def hashes(self, space: Space) -> list[bytes]:
        """The hashes of its full chunks."""
        blocks = len(self.tokens) // space.chunk_tokens * space.chunk_blocks
        chain = block_hashes(self.tokens, blocks)
        return space.hashes(KeySource(space.chunk_tokens, BLOCK_TOKENS, tokens=self.tokens, block_hashes=chain))


class Call(NamedTuple):
    """A call that can use the cache.

    Args:
        rows: the prompts.
        columns: tokens of each, padding included.
        expand: how often `generate` repeats each row (beams, sequences to return).
    """

    rows: list[Row]
    columns: int
    expand: int


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> list[Row]:
    """The rows of a batch. Raises `ValueError` for a mask that is not padding on the left."""
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has the shape {tuple(input_ids.shape)}, it must be [batch, tokens]")
    ids = input_ids.tolist()
    if attention_mask is None:
        return [Row(0, tokens) for tokens in ids]
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    mask = attention_mask != 0
    pads = (~mask).sum(dim=1).tolist()
    for row, (marks, pad) in enumerate(zip(mask.tolist(), pads, strict=True)):
        if any(marks[:pad]):
            raise ValueError(f"row {row} of attention_mask has zeros that are not padding on the left")
    return [Row(pad, tokens[pad:]) for pad, tokens in zip(pads, ids, strict=True)]


def read(model: Any, inputs: Any, given: Mapping[str, Any]) -> "Call | str":
    """The call, or why it cannot use the cache, as a sentence.

    Args:
        inputs: the first positional argument of `generate`. given: its keyword arguments.
    """

    def setting(name: str) -> Any:
        return _compat.setting(model, given, name)

    if model.training:
        return "the model is in training mode: call model.eval()"
    hooks = _compat.foreign_hooks(model)
    if hooks:
        return f"there is {hooks}, which may change what the model computes"
    odd = [name for name, value in given.items() if name not in _TENSORS and _has_tensor(value)]
    if odd:
        return f"KV may depend on {', '.join(odd)}, not on tokens alone"
    for name in ("past_key_values", "assistant_model", "custom_generate"):
        if given.get(name) is not None:
            return f"{name} was given"
    for name in (
        "output_attentions", "output_hidden_states", "prefill_chunk_size", "prompt_lookup_num_tokens",
        "assistant_early_exit",
    ):  # fmt: skip
        if setting(name):
            return f"{name} is set, which needs the whole prompt to be computed"
    if setting("token_healing"):
        return "token_healing is set, which changes the prompt"
    if setting("use_cache") is False:
        return "use_cache is False"
    if setting("cache_implementation") not in (None, "hybrid"):  # `hybrid` is what transformers takes for None
        return f"cache_implementation is {setting('cache_implementation')!r}"
    input_ids = inputs if inputs is not None else given.get("input_ids", given.get("inputs"))
    if not isinstance(input_ids, torch.Tensor):
        return "there are no input_ids"
    mask = given.get("attention_mask")
    if mask is None and _mask_is_guessed(input_ids, setting("pad_token_id"), setting("eos_token_id")):
        return "there is padding, but no attention_mask"
    try:
        rows = rows_of(input_ids, mask)
    except ValueError as error:
        return str(error)
    expand = max(setting("num_beams") or 1, setting("num_return_sequences") or 1)
    return Call(rows, input_ids.shape[1], expand)


def _has_tensor(value: Any) -> bool:
    """Is it a tensor, or several, such as images of different sizes?"""
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, torch.Tensor)


def _mask_is_guessed(input_ids: torch.Tensor, pad: Any, eos: Any) -> bool:
    """Will `generate` take tokens for padding by their id?"""
    ends: Sequence[Any] = eos if isinstance(eos, list | tuple) else [eos]
    return pad is not None and pad not in ends and bool((input_ids == pad).any())
