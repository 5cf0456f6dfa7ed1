"""Copies between paged KV and the arena are right byte for byte, whatever the layout."""

import sys
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.api import LayoutError, ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer import Copy, PagedCache
from kvcore.transfer import windows as windows_module
from kvcore.transfer.plan import Run
from kvcore.transfer.tensors import Tensors
from kvcore.transfer.windows import _piece, windows

BLOCKS = 24  # of the engine


def tensor(kind: str, dtype: torch.dtype, heads: int, tokens: int, width: int) -> torch.Tensor:
    """A layer of BLOCKS blocks of the same size, laid out in one of the ways that engines use."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        # memory order, and the permutation that puts blocks first
        "blocks first": ((BLOCKS, heads, tokens, width), (0, 1, 2, 3)),
        "kv first": ((2, BLOCKS, tokens, heads * width // 2), (1, 0, 2, 3)),
        "gaps between blocks": ((BLOCKS, 2, heads, tokens, width), (0, 1, 2, 3, 4)),
        "heads first": ((heads, BLOCKS, tokens, width), (1, 0, 2, 3)),
        "tokens before blocks": ((tokens, BLOCKS, heads, width), (1, 0, 2, 3)),
    }
    memory, order = shapes[kind]
    count = 1
    for n in memory:
        count *= n
    raw = torch.randint(0, 255, (count * dtype.itemsize,), dtype=torch.uint8)
    laid_out = raw.view(dtype).view(memory).permute(order)
    return laid_out[:, 0] if kind == "gaps between blocks" else laid_out


def one_allocation(layers: list[torch.Tensor], between: str) -> list[torch.Tensor]:
    """The same layers (all contiguous and alike) as views of one allocation: each whole, or block by block."""
    whole = torch.stack(layers, dim=0 if between == "layers" else 1)
    return [whole[i] if between == "layers" else whole[:, i] for i in range(len(layers))]


def block(layer: torch.Tensor, index: int) -> bytes:
    """One block's bytes by the plainest way there is."""
    return bytes(layer[index].contiguous().view(torch.uint8).reshape(-1).tolist())


KINDS = ("blocks first", "gaps between blocks", "kv first", "heads first", "tokens before blocks")


@st.composite
def parts(draw: st.DrawFn, layers: int) -> list[range | None]:
    """All layers at once, or in ranges that together hold each of them, in any order; some hold none."""
    if draw(st.booleans()):
        return [None]
    cuts = sorted(draw(st.lists(st.integers(0, layers), max_size=3)))
    ranges = [range(a, b) for a, b in zip([0, *cuts], [*cuts, layers + 1], strict=True)]
    return list(draw(st.permutations(ranges)))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]))
    heads, tokens, width = draw(st.sampled_from([(2, 4, 8), (1, 16, 6), (3, 2, 10)]))
    layers = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    tensors = [tensor(k, dtype, heads, tokens, width) for k in layers]
    if set(layers) == {"blocks first"} or draw(st.booleans()):
        tensors = [tensor("blocks first", dtype, heads, tokens, width) for _ in layers]
        tensors = one_allocation(tensors, draw(st.sampled_from(["layers", "blocks"])))
    per_object = draw(st.integers(1, 4))
    objects = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, per_object - 1))
        objects.append((first, draw(st.lists(st.integers(-1, BLOCKS - 1), min_size=1, max_size=per_object - first))))
    return {
        "layers": tensors,
        "element": dtype.itemsize,
        "per_object": per_object,
        "objects": objects,
        "ranks": draw(st.integers(1, 3)),
        "parts": draw(parts(len(tensors))),
    }


@pytest.fixture(scope="module")
def arena() -> Any:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@settings(max_examples=60, deadline=None)
@given(case=cases(), rows=st.sampled_from([None, True, False]))
def test_every_block_lands_where_the_layout_says(arena: Arena, case: dict[str, Any], rows: bool | None) -> None:
    layers = case["layers"]
    sizes = tuple(len(block(layer, 0)) for layer in layers)
    layout = ObjectLayout(case["per_object"], case["ranks"], sizes, "x", case["element"])
    slot_bytes = -(-layout.nbytes // 4096) * 4096
    for rank in range(case["ranks"]):
        arena.buffer[: slot_bytes * len(case["objects"])] = b"\xee" * (slot_bytes * len(case["objects"]))
        copies = [
            Copy(0, i * slot_bytes, arena.generation(i * slot_bytes), first, tuple(blocks))
            for i, (first, blocks) in enumerate(case["objects"])
        ]
        cache = PagedCache([layers], [layout], rank, arena, rows=rows)
        for part in case["parts"]:
            cache.store(copies, part)
        expected = bytearray(b"\xee" * (slot_bytes * len(copies)))
        for copy in copies:
            for i, layer in enumerate(layers):
                for j, b in enumerate(copy.blocks, copy.first):
                    at = copy.slot + rank * layout.rank_bytes + layout.blocks * sum(sizes[:i]) + j * sizes[i]
                    if b >= 0:
                        expected[at : at + sizes[i]] = block(layer, b)
        assert bytes(arena.buffer[: len(expected)]) == bytes(expected)

        targets = [torch.zeros_like(layer) for layer in layers]
        into = PagedCache([targets], [layout], rank, arena, rows=rows)
        for part in case["parts"]:
            assert into.load(copies, part) == set()
        last = {b: None for copy in copies for b in copy.blocks if b >= 0}
        for source, target in zip(layers, targets, strict=True):
            for b in range(BLOCKS):
                wanted = block(source, b) if b in last else bytes(len(block(source, b)))
                assert block(target, b) == wanted


def one(arena: Arena, blocks: int = 2) -> tuple[PagedCache, ObjectLayout, torch.Tensor]:
    layer = torch.arange(BLOCKS * 64, dtype=torch.int32).view(BLOCKS, 64)
    layout = ObjectLayout(blocks, 1, (256,), "int32", 4)
    return PagedCache([[layer]], [layout], 0, arena), layout, layer


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("memory", ["one allocation", "apart"])
def test_some_layers_leave_the_others_alone(arena: Arena, rows: bool, memory: str) -> None:
    layers = [tensor("blocks first", torch.uint8, 2, 4, 8) for _ in range(4)]
    if memory == "one allocation":
        layers = one_allocation(layers, "layers")
    layout = ObjectLayout(2, 1, (64,) * 4, "uint8", 1)
    copies = [Copy(0, 0, arena.generation(0), 0, (3, 5)), Copy(0, 4096, arena.generation(4096), 1, (9,))]
    arena.buffer[:8192] = b"\xee" * 8192
    cache = PagedCache([layers], [layout], 0, arena, rows=rows)
    cache.store(copies, range(1, 3))
    stored = {128 + 64 * k: b for k, b in enumerate([(1, 3), (1, 5), (2, 3), (2, 5)])} | {4288: (1, 9), 4416: (2, 9)}
    for at in range(0, 8192, 64):
        wanted = block(layers[stored[at][0]], stored[at][1]) if at in stored else b"\xee" * 64
        assert bytes(arena.buffer[at : at + 64]) == wanted, at
    before = [layer.clone() for layer in layers]
    arena.buffer[:8192] = bytes(8192)
    assert cache.load(copies, range(2, 4)) == set()
    for i, (layer, old) in enumerate(zip(layers, before, strict=True)):
        for b in range(BLOCKS):
            assert block(layer, b) == (bytes(64) if i >= 2 and b in (3, 5, 9) else block(old, b))


def test_a_slot_freed_during_the_copy_fails_its_blocks_only(arena: Arena) -> None:
    cache, _, _ = one(arena)
    copies = [Copy(0, i * 4096, arena.generation(i * 4096), 0, (2 * i, -1)) for i in range(3)]
    arena.bump([4096])
    assert cache.load(copies) == {2}


@pytest.mark.parametrize(
    "bad",
    [
        Copy(0, 0, 0, 0, (BLOCKS, 0)),
        Copy(0, 0, 0, 1, (0, 1)),
        Copy(0, 0, 0, -1, (0,)),
        Copy(0, 0, 0, 0, ()),
        Copy(1, 0, 0, 0, (0,)),
        Copy(0, -4096, 0, 0, (0,)),
        Copy(0, 1 << 20, 0, 0, (0,)),
        Copy(0, (1 << 20) - 256, 0, 0, (0,)),
    ],
)
def test_a_plan_out_of_bounds_is_refused_before_anything_is_written(arena: Arena, bad: Copy) -> None:
    cache, _, layer = one(arena)
    good = Copy(0, 8192, arena.generation(8192), 0, (3, 4))
    arena.buffer[8192:8704] = b"\x11" * 512
    before = layer.clone()
    with pytest.raises(LayoutError):
        cache.store([good, bad])
    assert bytes(arena.buffer[8192:8704]) == b"\x11" * 512
    with pytest.raises(LayoutError):
        cache.load([good, bad])
    assert torch.equal(layer, before)


def test_tensors_must_have_the_layouts_block_size(arena: Arena) -> None:
    layer = torch.zeros(BLOCKS, 65, dtype=torch.int32)
    with pytest.raises(LayoutError, match="260 bytes, the layout says 256"):
        PagedCache([[layer]], [ObjectLayout(2, 1, (256,), "int32", 4)], 0, arena)
    with pytest.raises(LayoutError, match="2 layers"):
        PagedCache([[layer]], [ObjectLayout(2, 1, (260, 260), "int32", 4)], 0, arena)
    with pytest.raises(LayoutError, match="rank 1"):
        PagedCache([[layer]], [ObjectLayout(2, 1, (260,), "int32", 4)], 1, arena)


def test_groups_may_overlay_the_same_memory(arena: Arena) -> None:
    shared = torch.randint(0, 255, (BLOCKS, 256), dtype=torch.uint8)
    layout = ObjectLayout(1, 1, (256,), "uint8", 1)
    cache = PagedCache([[shared], [shared]], [layout, layout], 0, arena)
    before = shared.clone()
    copies = [Copy(0, 0, arena.generation(0), 0, (1,)), Copy(1, 4096, arena.generation(4096), 0, (7,))]
    cache.store(copies)
    shared.zero_()
    cache.load(copies)
    assert torch.equal(shared[1], before[1])
    assert torch.equal(shared[7], before[7])
    assert int(shared.count_nonzero()) == int(before[1].count_nonzero() + before[7].count_nonzero())


def test_one_window_serves_layers_of_one_allocation_but_never_encloses_the_arena() -> None:
    whole = torch.randint(0, 255, (3, BLOCKS, 4096), dtype=torch.uint8)
    outside = memoryview(bytearray(4096 * 3))
    assert len(windows([whole[0], whole[1], whole[2]], 1, outside) or []) == 1
    inside = memoryview(whole[1].numpy()).cast("B")  # the arena, between the two layers
    apart = windows([whole[0], whole[2]], 1, inside)
    assert len(apart or []) == 2


def test_pieces_stay_above_a_page_where_blocks_allow_it() -> None:
    """Layers whose distance is odd must not drag each other down to tiny pieces."""
    raw = torch.zeros(2 * BLOCKS * 8192 + 256, dtype=torch.uint8)
    layers = [raw[at : at + BLOCKS * 8192].view(BLOCKS, 8192) for at in (0, BLOCKS * 8192 + 256)]
    assert len(windows(layers, 1, memoryview(bytearray(16384))) or []) == 2


def test_each_layer_is_looked_at_a_few_times_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some engines have other tensors, and so other windows, for every request."""
    looked: list[Any] = []

    def piece(layers: Any) -> int:
        looked.extend(layers)
        return _piece(layers)

    monkeypatch.setattr(windows_module, "_piece", piece)
    whole = torch.zeros((200, BLOCKS, 4096), dtype=torch.uint8)
    assert len(windows(list(whole), 1, memoryview(bytearray(200 * 4096))) or []) == 1
    assert len(looked) <= 5 * len(whole)


@pytest.mark.parametrize("dtypes", [(torch.uint8, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_layers_of_a_device_cross_in_one_copy(dtypes: tuple[torch.dtype, ...]) -> None:
    """The way of devices, on a CPU: whole objects staged, parts layer by layer."""
    layers = [torch.randint(0, 255, (BLOCKS, 6), dtype=torch.uint8).repeat(1, t.itemsize).view(t) for t in dtypes]
    layers[0] = layers[0][:, :5] if dtypes[0] == torch.uint8 else layers[0]  # the next layer starts at an odd offset
    sizes = [len(block(layer, 0)) for layer in layers]
    memory = memoryview(bytearray(1024))
    wanted = [Run(0, 0, (4, 1, 9)), Run(512, 1, (7,))]
    Tensors(layers, 3, memory, staged=True).gather(wanted)
    expected = bytearray(1024)
    for run in wanted:
        for i, layer in enumerate(layers):
            for j, b in enumerate(run.ids, run.first):
                at = run.base + 3 * sum(sizes[:i]) + j * sizes[i]
                expected[at : at + sizes[i]] = block(layer, b)
    assert bytes(memory) == bytes(expected)
    targets = [torch.zeros_like(layer) for layer in layers]
    Tensors(targets, 3, memory, staged=True).scatter(wanted)
    for source, target in zip(layers, targets, strict=True):
        for b in range(BLOCKS):
            assert block(target, b) == (block(source, b) if b in (1, 4, 7, 9) else bytes(len(block(source, b))))


def test_layers_that_cannot_be_written_are_refused(arena: Arena) -> None:
    layer = torch.zeros(1, 64, dtype=torch.int32).expand(BLOCKS, 64)
    with pytest.raises(LayoutError, match="share memory"):
        PagedCache([[layer]], [ObjectLayout(2, 1, (256,), "int32", 4)], 0, arena)
    with pytest.raises(LayoutError, match="0 KV groups"):
        PagedCache([], [ObjectLayout(2, 1, (256,), "int32", 4)], 0, arena)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_bulk_of_a_copy_runs_without_the_gil(direction: str) -> None:
    """Another Python thread goes on while a large copy runs, in both directions and with few blocks."""
    arena = Arena(256 << 20)
    layer = torch.zeros(64, 4 << 20, dtype=torch.uint8)
    layout = ObjectLayout(32, 1, (4 << 20,), "uint8", 1)
    cache = PagedCache([[layer]], [layout], 0, arena)
    ids = tuple(range(62, -2, -2))
    copies = [Copy(0, 0, 0, 0, ids)]
    getattr(cache, direction)(copies)  # faults the memory in
    began, done = threading.Event(), threading.Event()
    inside = 0

    def copy() -> None:
        began.set()
        getattr(cache, direction)(copies)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the GIL is handed over only by a thread that frees it
    thread = threading.Thread(target=copy)
    try:
        thread.start()
        began.wait()
        while not done.is_set():
            inside += 1
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
        arena.close()
    assert inside > 2
