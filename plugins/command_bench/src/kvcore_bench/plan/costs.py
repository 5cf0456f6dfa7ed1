"""The arithmetic of a plan: bytes, seconds and the length at which a load costs as much as computing. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.api import ConfigError
from kvcore.engine.space import GroupSpec, ModelSpec, object_layout, resolve_chunk_tokens, window_chunks
from kvcore_bench.plan.model import Layer, Model

PADDING = 1.5
"""vLLM makes groups of as many layers as the rarest kind has, or as the commonest, when that has not so many times as
many."""
Prefill = Callable[[int], float]
"""Seconds that the engine takes to compute a prompt of so many tokens."""


class Store(NamedTuple):
    """How fast a tier is: bytes a second when many objects are loaded, and seconds before the first comes."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group: layers whose KV is one object for each chunk.

    Args:
        layers: how many.
        token_bytes: of one token, all ranks.
        object_bytes: of one chunk.
        window: tokens, or None.
        window_tokens: what a load needs at most, whole chunks.
    """

    layers: int
    token_bytes: int
    object_bytes: int
    window: int | None
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class Kv:
    """What a model's KV weighs as kvcore stores it."""

    ranks: int
    block_tokens: int
    chunk_tokens: int
    groups: tuple[Group, ...]
    once_bytes: int
    """Bytes of a token without what several ranks have alike."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, all layers and ranks."""
        return sum(g.token_bytes for g in self.groups)

    def stored_bytes(self, tokens: int) -> int:
        """What so many tokens take in a tier: also those that a window has left behind."""
        return tokens * self.token_bytes

    def loaded_bytes(self, tokens: int) -> int:
        """What a lookup loads for a prefix of so many tokens: of a window only its end."""
        return sum(
            g.token_bytes * (tokens if g.window_tokens is None else min(tokens, g.window_tokens)) for g in self.groups
        )

    def load_seconds(self, tokens: int, store: Store) -> float:
        """How long that takes."""
        return store.latency_s + self.loaded_bytes(tokens) / store.bytes_per_s


def weigh(model: Model, ranks: int, block_tokens: int, chunk_tokens: int | str, min_object_bytes: int) -> Kv:
    """The KV of `model` on so many tensor-parallel ranks. Raises `ConfigError`."""
    kinds: dict[Layer, int] = {}
    for layer in model.layers:
        kinds[layer] = kinds.get(layer, 0) + 1
    if ranks < 1 or model.heads % ranks:
        raise ConfigError(f"--tp {ranks}: it must divide the model's {model.heads} attention heads")
    groups: list[tuple[Layer, int]] = []
    size = min(kinds.values())
    if max(kinds.values()) < PADDING * size:
        size = max(kinds.values())
    for layer, count in kinds.items():
        parts = -(-count // size)
        groups += [(layer, len(range(i, count, parts))) for i in range(parts)]
    specs = tuple(
        GroupSpec(tuple(map(str, range(n))), (_rank_bytes(model, layer, ranks) * block_tokens,) * n, layer.window)
        for layer, n in groups
    )
    spec = ModelSpec(
        "plan", "", "", model.dtype, model.element_bytes, "", "", "", block_tokens, ranks, specs
    )  # what it is called plays no part
    chunk = resolve_chunk_tokens(spec, chunk_tokens, min_object_bytes)
    found = []
    for group, (layer, n) in zip(specs, groups, strict=True):
        chunks = window_chunks(layer.window, chunk)
        found.append(
            Group(
                layers=n,
                token_bytes=n * _rank_bytes(model, layer, ranks) * ranks,
                object_bytes=object_layout(spec, group, chunk // block_tokens).nbytes,
                window=layer.window,
                window_tokens=None if chunks is None else chunks * chunk,
            )
        )
    once = sum(layer.heads * layer.elements for layer in model.layers) * model.element_bytes
    return Kv(ranks, block_tokens, chunk, tuple(found), once)


def _rank_bytes(model: Model, layer: Layer, ranks: int) -> int:
    """Bytes of one token of one layer on one rank: with fewer heads than ranks, several ranks have the same."""
    if layer.heads % ranks and ranks % layer.heads:
        raise ConfigError(f"--tp {ranks}: it must divide the {layer.heads} KV heads, or be a multiple of them")
    return max(1, layer.heads // ranks) * layer.elements * model.element_bytes


def at_speed(tokens_per_s: float) -> Prefill:
    """Prefill at a speed that was measured."""
    return lambda tokens: tokens / tokens_per_s


def by_flops(model: Model, flops_per_s: float) -> Prefill:
    """Prefill estimated from the work of a prompt and what the devices do of it in a second, all together."""
    full = sum(layer.window is None for layer in model.layers) + model.depth - len(model.layers)
    windows = [layer.window for layer in model.layers if layer.window is not None]
    pair = 2 * model.heads * model.score_elements

    def seconds(tokens: int) -> float:
        pairs = full * tokens * tokens / 2
        for window in windows:
            inside = min(tokens, window)
            pairs += inside * inside / 2 + (tokens - inside) * window
        return (2 * model.parameters * tokens + pair * pairs) / flops_per_s

    return seconds


def break_even(kv: Kv, prefill: Prefill, store: Store, max_tokens: int) -> int | None:
    """The shortest prefix, in whole chunks, that is loaded at least as fast as computed; None up to `max_tokens`.

    Longer ones are, too: a token costs the more to compute the further back it stands, and never the more to load.
    """
    chunk = kv.chunk_tokens
    least, most = 1, max(1, max_tokens // chunk)

    def pays(chunks: int) -> bool:
        return kv.load_seconds(chunks * chunk, store) <= prefill(chunks * chunk)

    if not pays(most):
        return None
    while least < most:
        middle = (least + most) // 2
        if pays(middle):
            most = middle
        else:
            least = middle + 1
    return most * chunk


def lengths(max_tokens: int) -> list[int]:
    """Lengths of prompts to show."""
    return [n for n in (1024, 8192, 32768, 131072) if n < max_tokens] + [max_tokens]
