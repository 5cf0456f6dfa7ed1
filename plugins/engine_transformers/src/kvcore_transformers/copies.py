"""Copies between the keys and values of a transformers cache and the arena."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvcore.api import ArenaError
from kvcore.engine import ArenaView, Engine, GroupSpec, Space, attach_arena
from kvcore.transfer import Copy, PagedCache
from kvcore_transformers.calls import Row
from kvcore_transformers.keys import BLOCK_TOKENS

Layers = list[tuple[torch.Tensor, torch.Tensor] | None]
"""Keys and values of each layer, `[batch, heads, tokens, size]`; None for a layer without any."""


class Part(NamedTuple):
    """Keys or values of one layer: heads, size of a head, element type and device."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


class Shape:
    """How a model's cache looks, learnt from one that it has filled."""

    def __init__(self, layers: Layers) -> None:
        self.layers = [None if pair is None else (_part(pair[0]), _part(pair[1])) for pair in layers]
        parts = [part for pair in self.layers if pair for part in pair]
        self.first = parts[0]
        devices = {part.device for part in parts}
        # Layers on several devices cross by host memory, so that a plan is one copy.
        self.device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def group(self) -> GroupSpec:
        """All layers as one KV group: sliding windows are kept whole."""
        names, sizes = [], []
        for i, pair in enumerate(self.layers):
            for kind, part in zip(("keys", "values"), pair or (), strict=False):
                if part.heads * part.size:
                    names.append(f"{i}.{kind}:{part.heads}x{part.size}:{part.dtype}")
                    sizes.append(BLOCK_TOKENS * part.heads * part.size * part.dtype.itemsize)
        return GroupSpec(tuple(names), tuple(sizes))

    def empty(self, batch: int, columns: int) -> Layers:
        """Room for so many columns, not initialised."""

        def room(part: Part) -> torch.Tensor:
            return torch.empty(batch, part.heads, columns, part.size, dtype=part.dtype, device=self.device)

        return [pair and (room(pair[0]), room(pair[1])) for pair in self.layers]

    def at_home(self, layers: Layers) -> Layers:
        """The same with each layer on its own device."""
        return [
            pair and home and (pair[0].to(home[0].device), pair[1].to(home[1].device))
            for pair, home in zip(layers, self.layers, strict=True)
        ]

    def together(self, layers: Layers) -> Layers:
        """The same with all layers on the device of the copies."""
        return [pair and (pair[0].to(self.device), pair[1].to(self.device)) for pair in layers]


def _part(tensor: torch.Tensor) -> Part:
    return Part(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)


def blocks_of(layers: Layers, row: int, pad: int, blocks: int) -> list[torch.Tensor]:
    """Keys and values of one row as blocks: `tensor[i]` holds its tokens from `i * BLOCK_TOKENS` on."""
    end = pad + blocks * BLOCK_TOKENS
    return [
        tensor[row, :, pad:end].unflatten(1, (blocks, BLOCK_TOKENS)).transpose(0, 1)
        for pair in layers
        for tensor in pair or ()
        if tensor.shape[1] * tensor.shape[3]
    ]


class Arenas:
    """The arena of now. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._token = ""
        self._view: ArenaView | None = None

    def view(self, token: str) -> ArenaView:
        """The arena of this name. Raises `ArenaError` when it is gone: its server has ended."""
        with self._lock:
            if token != self._token or self._view is None:
                descriptor = self._engine.descriptor()
                if descriptor is None or descriptor["token"] != token:
                    raise ArenaError("the server that held it is gone")
                self._let_go()
                self._view, self._token = attach_arena(descriptor), token
            return self._view

    def close(self) -> None:
        """Unmap it. Idempotent."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        view, self._view, self._token = self._view, None, ""
        if view is not None:
            view.close()


def load(arena: ArenaView, space: Space, layers: Layers, row: int, pad: int, plan: Sequence[Copy]) -> int:
    """Do a plan of loads into one row; how many of its tokens are there, from the first on."""
    blocks = 1 + max(block for copy in plan for block in copy.blocks)
    bad = PagedCache([blocks_of(layers, row, pad, blocks)], space.groups, 0, arena).load(plan)
    return min(bad, default=blocks) * BLOCK_TOKENS


def store(arena: ArenaView, space: Space, layers: Layers, row: int, pad: int, plan: Sequence[Copy]) -> None:
    """Do a plan of stores from one row."""
    blocks = 1 + max(block for copy in plan for block in copy.blocks)
    PagedCache([blocks_of(layers, row, pad, blocks)], space.groups, 0, arena).store(plan)


def zero_padding(layers: Layers, rows: Sequence[Row]) -> None:
    """Padding is masked, but what is masked must be finite."""
    for pair in layers:
        for tensor in pair or ():
            for i, row in enumerate(rows):
                tensor[i, :, : row.pad].zero_()


def cut(layers: Layers, columns: int) -> Layers:
    """The first columns only."""
    return [pair and (pair[0][:, :, :columns], pair[1][:, :, :columns]) for pair in layers]


def probe(model: Any, cache: Any) -> None:
    """Let the model fill a cache with two tokens."""
    device = next(iter(model.parameters())).device
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), past_key_values=cache, use_cache=True)
