"""The CUDA kernels put every byte where torch does, whatever the layout: as host code, through the whole mover."""

import mmap
import re
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import cuda_host
import numpy as np
import pytest
import torch
from cuda_fake import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.transfer.cuda.lanes import Gpu, Lane, Speeds
from kvcore.transfer.cuda.mover import CudaMover, cuda_mover
from kvcore.transfer.plan import Run
from kvcore.transfer.tensors import Tensors

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
"""vLLM's: layer, block, head, token, content (K and V of a token, or MLA's latent)."""
HEADS = {"MHA": 4, "GQA": 2, "MLA": 1}
WAYS = ("direct", "staged", "bounced")
BLOCKS = 12  # of the engine


def laid_out(
    layout: str, layers: int, heads: int, tokens: int, content: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """Layers as views `[block, head, token, content]` of one allocation in this order."""
    sizes = {"L": layers, "B": BLOCKS, "H": heads, "N": tokens, "C": content * dtype.itemsize}
    memory = torch.randint(0, 255, [sizes[axis] for axis in layout], dtype=torch.uint8, device=device).view(dtype)
    return list(memory.permute([layout.index(axis) for axis in "LBHNC"]))


def kv_first(layers: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers whose K and V are apart, as FlashAttention has them: `[2, block, token, head, width]` each."""
    shape = (2, BLOCKS, tokens, heads, width * dtype.itemsize)
    return [torch.randint(0, 255, shape, dtype=torch.uint8).view(dtype).transpose(0, 1) for _ in range(layers)]


@st.composite
def engines(draw: st.DrawFn) -> list[torch.Tensor]:
    """A group's layers."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]))
    heads = HEADS[draw(st.sampled_from(sorted(HEADS)))]
    tokens, content = draw(st.sampled_from([1, 3, 5, 16])), draw(st.sampled_from([1, 3, 8, 18]))
    layers = draw(st.integers(1, 4))
    layout = draw(st.sampled_from([*LAYOUTS, "kv first", "mixed"]))
    if layout == "kv first":
        return kv_first(layers, heads, tokens, content, dtype)
    if layout == "mixed":  # layers of several sizes in one group
        return [
            t for n in (1, 3) for t in laid_out(draw(st.sampled_from(LAYOUTS)), n, heads, tokens, n + content, dtype)
        ]
    return laid_out(layout, layers, heads, tokens, content, dtype)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Run], int]:
    """Blocks per object, runs, and the bytes by which each object is off a multiple of 4096, as a rank's range is."""
    per_object = draw(st.integers(1, 5))
    odd = draw(st.sampled_from([0, 0, 16, 8, 4, 2, 1, 6]))
    ids = draw(st.permutations(range(BLOCKS)))
    runs = []
    for i in range(draw(st.integers(1, BLOCKS // per_object))):
        first = draw(st.sampled_from([0, 0, per_object - 1]))
        own = ids[i * per_object : (i + 1) * per_object][: per_object - first]
        runs.append((i, first, own[: draw(st.integers(1, len(own)))] if draw(st.booleans()) else own))
    return per_object, [Run(i, first, own) for i, first, own in runs], odd


def moved(layers: list[torch.Tensor], blocks: int, memory: memoryview, way: str, room: int, rows: int) -> CudaMover:
    """A mover that takes this way."""
    device = FakeDevice(room, pin_error=MemoryError("no") if way == "bounced" else None)
    for layer in layers:
        device.hold(layer)
    gpu = Gpu(device, max(room, *(t[0].numel() * t.element_size() for t in layers)), rows)
    for lane in (gpu.save, gpu.load):
        lane.speeds = replace(Speeds(1e30, 1.0, 0.0) if way == "direct" else Speeds(1.0, 1e30, 0.0), groups=3)
    mover = cuda_mover(layers, blocks, memory, gpu)
    assert mover is not None
    assert mover.arena.wait() == (way != "bounced")
    return mover


def differs(layers: list[torch.Tensor], plan: tuple[int, list[Run], int], part: range, mover_of: Any) -> str:
    """What the mover and torch disagree on, or ""."""
    per_object, runs, odd = plan
    object_bytes = -(-sum(per_object * t[0].numel() * t.element_size() for t in layers) // 4096) * 4096 + 4096
    runs = [Run(i * object_bytes + odd, first, ids) for i, first, ids in runs]
    # Pages of their own: a GPU pins whole ones.
    ours, theirs = (np.frombuffer(mmap.mmap(-1, object_bytes * len(runs) + 64), np.uint8) for _ in range(2))
    ours[:] = theirs[:] = 0xEE
    mover = mover_of(layers, per_object, memoryview(ours))
    mover.gather(runs, part)
    Tensors(layers, per_object, memoryview(theirs)).gather(runs, part)
    if bytes(ours) != bytes(theirs):
        return "gather"
    ours[:] = theirs[:] = np.random.default_rng(0).integers(0, 255, len(ours), np.uint8)
    before = [t.clone() for t in layers]
    mover.scatter(runs, part)
    found = [t.clone() for t in layers]
    for t, old in zip(layers, before, strict=True):
        t.copy_(old)
    Tensors(layers, per_object, memoryview(theirs)).scatter(runs, part)
    same = all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, layers, strict=True)
    )
    return "" if same else "scatter"


@settings(max_examples=200, deadline=None)
@given(layers=engines(), plan=plans(), way=st.sampled_from(WAYS), data=st.data())
def test_every_byte_lands_where_torch_puts_it(
    layers: list[torch.Tensor], plan: tuple[int, list[Run], int], way: str, data: st.DataObject
) -> None:
    room, rows = data.draw(st.sampled_from([1, 500, 4000, 1 << 15])), data.draw(st.sampled_from([1, 3, 16]))
    begin = data.draw(st.integers(0, len(layers) - 1))
    part = range(begin, data.draw(st.integers(begin + 1, len(layers)))) if data.draw(st.booleans()) else None
    assert not differs(layers, plan, part, lambda *args: moved(*args, way=way, room=room, rows=rows))


@pytest.mark.parametrize("attention", sorted(HEADS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_of_vllm(layout: str, attention: str) -> None:
    """Each of them, with blocks of 16 tokens."""
    content = 576 if attention == "MLA" else 64
    layers = laid_out(layout, 3, HEADS[attention], 16, content, torch.bfloat16)
    plan = (4, [Run(0, 0, (7, 2, 11, 3)), Run(1, 2, (5, 1)), Run(2, 0, (0, 9, 4, 8))], 0)
    for way in WAYS:
        assert not differs(layers, plan, None, lambda *args, w=way: moved(*args, way=w, room=1 << 15, rows=16))


PLAIN = (3, [Run(0, 0, (7, 2, 11)), Run(1, 1, (5, 1))], 0)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row.base + layer.at", "row.base"),
        ("row.index * layer.block_bytes", "row.index * layer.segment"),
        ("row.block * layer.stride", "row.index * layer.stride"),
        ("offsets[segment]", "offsets[0]"),
        ("word - segment * per_segment", "word"),
        ("layers[item % depth]", "layers[0]"),
        ("rows[item / depth]", "rows[0]"),
        ("item += gridDim.x", "item += gridDim.x + 1"),
        ("first += UNROLL * blockDim.x", "first += 2 * UNROLL * blockDim.x"),
        ("run<true>", "run<false>"),
    ],
)
def test_a_wrong_index_is_found(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: each part of the kernels' arithmetic, spoilt, is noticed."""
    source = cuda_host.SOURCE.read_text()
    assert source.count(right) == 1
    library = cuda_host.compiled(source.replace(right, wrong))
    monkeypatch.setattr(cuda_host, "kernels", lambda: library)
    monkeypatch.setattr(Lane, "_measured", lambda *_: Speeds(1.0, 1.0, 0.0))  # which notices most of them by itself
    layers = laid_out("LHBNC", 3, 2, 16, 64, torch.bfloat16)
    assert differs(layers, PLAIN, None, lambda *args: moved(*args, way="direct", room=1 << 15, rows=16))


ALIGNMENT = """
import cuda_host, test_cuda_layouts as t
library = cuda_host.compiled(cuda_host.SOURCE.read_text().replace(" | layer.bits) & 15", ") & 15"))
cuda_host.kernels = lambda: library
layers = t.laid_out("LBNHC", 1, 1, 3, 3, t.torch.bfloat16)
print(t.differs(layers, t.PLAIN, None, lambda *args: t.moved(*args, way="staged", room=1 << 15, rows=16)))
"""


def test_a_wrong_alignment_is_found() -> None:
    """Too wide an access is a fault of the device on a GPU, and ends the process here."""
    folder = str(cuda_host.__file__).rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", ALIGNMENT], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGILL, done.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_for_gpus(arch: str) -> None:
    """By NVRTC, with the options that CuPy is given; they move 16 bytes at once and spill nothing to memory."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(cuda_host.SOURCE.read_text(), "blocks.cu", [], [])
    options = [f"--gpu-architecture={arch}", "-std=c++17", "-ftz=true", "--ptxas-options=-v"]
    nvrtc.compileProgram(program, options)
    log = nvrtc.getProgramLog(program)
    assert "warning" not in log
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"], log
    assert all(int(n) <= 128 for n in re.findall(r"Used (\d+) registers", log)), log  # two thread blocks at once
    assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"
    text = nvrtc.getPTX(program).decode()
    assert set(re.findall(r"\.entry (\w+)", text)) == {"kvcore_gather", "kvcore_scatter"}
    assert len(re.findall(r"\bld(?:\.global)?\.v2\.u64", text)) >= 8  # four in flight, in each direction
    assert len(re.findall(r"\bst(?:\.global)?\.v2\.u64", text)) >= 8
