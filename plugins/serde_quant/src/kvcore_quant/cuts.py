"""Which elements share a scale: learnt from the KV itself.

An engine block is opaque. Keys and values stand in it one after the other, head by head or layer by layer; keys may be
transposed or in the order of a matrix unit. Yet keys want a scale for each channel over tokens (some channels are large
for all tokens) and values one for each token. In memory either is the same thing: elements that stand `stride` apart.
So a layer's blocks are cut into equal regions, and each region gets, of all strides that divide it, the one whose
groups are the narrowest. Nobody has to say what an engine's blocks look like, and nobody can say it wrongly.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvcore.api import ObjectLayout
from kvcore_quant.floats import Kind, widen

REGIONS = (256, 32768)
"""Least and most elements of a region."""
BATCH = 1 << 17
"""Elements that are worked on at once: half a MiB of float32, which stays in the CPU's cache."""
RUNS = (128, 64, 32, 16, 8)
"""Elements of a group within one block."""
MIN_GROUP = 8
SAMPLE = 1 << 17
"""Elements that are looked at for all cuts."""
MOST_CUTS = 8
NEAR = 0.05
"""A larger region, or one cut less, may cost so many bits an element."""
CLOSE, GAIN = 4, 0.6
"""Groups whose elements stand further apart than the first must save the second, in bits an element. Values have
channels, too, and scales along them make the mean error smaller and the answers worse: what counts is each token's own
error. In SmolLM2-135M, scales along channels save 1.4 bits in keys (0.6 to 2.4 by head) and 0.2 in values (below 0.5 in
nine of ten), so this tells one from the other. Keys that an engine keeps transposed have channels at stride 1."""
LEAST, HUGE = 1e-6, 1e38
"""Bounds of a group's width."""


class Cut(NamedTuple):
    """The groups of a region: `run` elements that stand `stride` apart, in each of `across` consecutive blocks."""

    run: int
    across: int
    stride: int

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.run * self.across


class Span(NamedTuple):
    """Consecutive layers with blocks of one size.

    Args:
        offset: of the first layer within a rank's range, in bytes.
        layers: how many.
        block: elements of one block; 0 when a block is no whole number of elements.
        nbytes: of one rank's part.
    """

    offset: int
    layers: int
    block: int
    nbytes: int


class Plan(NamedTuple):
    """How an object is cut: for each span the elements of a region (0: left as it is), and for each layer and region
    the number of its cut, from 1; 0: left as it is."""

    cuts: tuple[Cut, ...]
    regions: tuple[int, ...]
    tables: tuple[Any, ...]


@lru_cache(256)
def spans(layout: ObjectLayout, width: int) -> tuple[Span, ...]:
    """The spans of `layout`, whose elements have `width` bytes."""
    found: list[Span] = []
    offset = 0
    for nbytes in layout.layer_block_bytes:
        block = 0 if nbytes % width else nbytes // width
        if found and found[-1].block == block and block:
            last = found[-1]
            found[-1] = last._replace(layers=last.layers + 1, nbytes=last.nbytes + nbytes * layout.blocks)
        else:
            found.append(Span(offset, 1, block, nbytes * layout.blocks))
        offset += nbytes * layout.blocks
    return tuple(found)


def ranges(payload: Any, layout: ObjectLayout, span: Span) -> Any:
    """A span's bytes as `[rank, byte]`, a view."""
    return payload.reshape(layout.ranks, -1)[:, span.offset : span.offset + span.nbytes]


def rows(payload: Any, layout: ObjectLayout, span: Span, region: int, words: str) -> Any:
    """A span as `[rank, layer, region, block, element]`, a view."""
    part = ranges(payload, layout, span).view(words)
    shape = (layout.ranks, span.layers, layout.blocks, span.block // region, region)
    return part.reshape(shape).swapaxes(2, 3)


def grouped(cells: Any, cut: Cut) -> Any:
    """`[cell, block, element]` as `[cell, across, run, block / across, outer, stride]`, a view: the first two after the
    cell go through a group, the others through the groups."""
    n, blocks, elements = cells.shape
    shape = (n, blocks // cut.across, cut.across, elements // (cut.run * cut.stride), cut.run, cut.stride)
    return cells.reshape(shape).transpose(0, 2, 4, 1, 3, 5)


def learn(payload: Any, layout: ObjectLayout, kind: Kind, sizes: tuple[int, int], overhead: int) -> Plan:
    """The plan for objects like `payload`. `sizes`: least and most elements of a group (fewer, where
    blocks have no more). `overhead`: bits that each one costs."""
    cuts: list[Cut] = []
    regions: list[int] = []
    tables: list[Any] = []
    for span in spans(layout, kind.width):
        region, table = 0, _table(span, 0)
        if span.block >= REGIONS[0]:
            region, choice = _learn_span(payload, layout, span, kind, sizes, overhead)
            if region:
                table = _table(span, span.block // region)
                for cut, where in choice:
                    if cut not in cuts:
                        cuts.append(cut)
                    table[where] = cuts.index(cut) + 1
        regions.append(region)
        tables.append(table)
    return Plan(tuple(cuts), tuple(regions), tuple(tables))


def _learn_span(
    payload: Any, layout: ObjectLayout, span: Span, kind: Kind, sizes: tuple[int, int], overhead: int
) -> tuple[int, list[tuple[Cut, Any]]]:
    """The region's size, and each cut with a mask `[layer, region]` of where it is taken."""
    most = min(REGIONS[1], max(REGIONS[0], BATCH // layout.blocks))
    regions = [n for n in _divisors(span.block) if REGIONS[0] <= n <= most]
    candidates = [
        Cut(run, across, stride)
        for run in RUNS
        if run <= sizes[1] and span.block % run == 0
        for across in [max(n for n in _divisors(layout.blocks) if n * run <= sizes[1])]
        if run * across >= MIN_GROUP
        for stride in _divisors(span.block // run)
        if run * stride <= most
    ]
    least = min(sizes[0], max((cut.group for cut in candidates), default=0))
    candidates = [cut for cut in candidates if cut.group >= least]
    across = max((cut.across for cut in candidates), default=1)
    blocks = rows(payload, layout, span, span.block, f"<u{kind.width}")[0, :, 0, :across]
    # First all cuts on a part, then the best of them on the front blocks of all layers.
    some = _floats(_sample(blocks), kind)
    costs = {cut: _costs(some, cut, overhead) for cut in candidates}
    best: dict[int, tuple[float, list[Cut]]] = {}
    for size in regions:
        fitting = [cut for cut in candidates if size % (cut.run * cut.stride) == 0]
        if fitting and some.shape[-1] % size == 0:
            table = np.stack([_by_region(costs[cut], size, cut) for cut in fitting])
            chosen = _few(table.reshape(len(fitting), -1))
            # regions of several sizes are compared by what they have in common, the part as a whole
            best[size] = float(table[chosen].min(axis=0).mean()), [fitting[i] for i in chosen]
    if not best:
        return 0, []
    lowest = min(cost for cost, _ in best.values())
    size = max(size for size, (cost, _) in best.items() if cost <= lowest + NEAR)
    shortlist = best[size][1]
    cells = rows(payload, layout, span, size, f"<u{kind.width}")[0, :, :, :across]
    choice = np.empty(cells.shape[:2], np.intp)
    for layer, of_layer in enumerate(cells):
        for part in batches(len(of_layer), across * size):
            values = _floats(of_layer[part], kind)
            choice[layer, part] = np.stack([_costs(values, cut, overhead).mean(axis=1) for cut in shortlist]).argmin(0)
    masks = [(cut, choice == i) for i, cut in enumerate(shortlist)]
    return size, [(cut, mask) for cut, mask in masks if mask.any()]


def _table(span: Span, regions: int) -> Any:
    return np.zeros((span.layers, regions), np.uint8)


def _few(table: Any) -> list[int]:
    """Of `table[cut, region]`, as few cuts as come close to the best of each region: few do not fit chance, and make
    long rows for the arithmetic."""
    chosen: list[int] = []
    before = np.inf
    while len(chosen) < MOST_CUTS:
        costs = np.minimum(table[chosen].min(axis=0, initial=np.inf), table).mean(axis=1)
        if costs.min() > before - NEAR:
            break
        chosen.append(int(costs.argmin()))
        before = float(costs.min())
    return chosen


def _floats(blocks: Any, kind: Kind) -> Any:
    values = np.empty(blocks.shape, np.float32)
    widen(blocks, kind, values)
    return values


def _sample(blocks: Any) -> Any:
    """Layers, first, last and between, or, of one large layer, the front of its blocks: about `SAMPLE` elements."""
    layers, across, elements = blocks.shape
    if across * elements > SAMPLE:
        front = max(n for n in _divisors(elements) if n * across <= SAMPLE or n == 1)
        return blocks[:1, :, :front]
    some = min(layers, max(1, SAMPLE // (across * elements)))
    # At least two neighbours, because some engines give keys and values as layers of their own.
    picked = sorted({0, min(1, layers - 1), *np.linspace(0, layers - 1, some).astype(int).tolist()})
    return blocks[picked]


def _costs(values: Any, cut: Cut, overhead: int) -> Any:
    """For each first index and each tile (the smallest piece that holds whole groups) how many bits an element takes in
    steps of one size, up to a constant: the logarithm of its group's width, and its part of what the group costs."""
    n, _, elements = values.shape
    tiles = elements // (cut.run * cut.stride)
    parts = values[:, : cut.across].reshape(n, cut.across, tiles, cut.run, cut.stride)
    with np.errstate(invalid="ignore", over="ignore"):
        width = np.nan_to_num(parts.max(axis=(1, 3)) - parts.min(axis=(1, 3)), nan=HUGE, posinf=HUGE)
    np.maximum(width, LEAST, out=width)
    bits = np.log2(width, out=width).mean(axis=-1, dtype=np.float64) + overhead / cut.group
    return bits + GAIN if cut.stride > CLOSE else bits


def _by_region(costs: Any, size: int, cut: Cut) -> Any:
    """Costs of tiles as means of regions."""
    return costs.reshape(len(costs), -1, size // (cut.run * cut.stride)).mean(axis=-1)


@lru_cache(256)
def _divisors(n: int) -> tuple[int, ...]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return tuple(sorted({*small, *(n // i for i in small)}))


def batches(count: int, each: int) -> Iterator[slice]:
    """Slices of `count` cells of `each` elements, small enough to stay in the CPU's cache."""
    step = max(1, BATCH // max(1, each))
    for first in range(0, count, step):
        yield slice(first, min(count, first + step))
