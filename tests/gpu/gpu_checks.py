"""The CUDA transfer on a real GPU: `make test-gpu`. Not part of `make test`, whose machines have none."""

import gc
import mmap
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "kvcore"))  # the layouts and the comparison of the tests without a GPU

from test_cuda_layouts import HEADS, LAYOUTS, PLAIN, differs, laid_out  # noqa: E402

from kvcore.api import ObjectLayout  # noqa: E402
from kvcore.l1 import Arena  # noqa: E402
from kvcore.transfer import Copy, PagedCache  # noqa: E402
from kvcore.transfer.cuda.device import CudaDevice  # noqa: E402
from kvcore.transfer.cuda.lanes import Gpu, Speeds  # noqa: E402
from kvcore.transfer.cuda.mover import CudaMover, cuda_mover  # noqa: E402

WAYS = ("direct", "staged", "bounced")


class Unpinnable(CudaDevice):
    """Nothing can be pinned there."""

    def pin(self, address: int, nbytes: int) -> None:
        raise MemoryError("not here")


@pytest.fixture(scope="module")
def gpus() -> dict[str, Gpu]:
    """A GPU that takes each way; buffers so small that a call takes several pieces."""
    found = {}
    for way in WAYS:
        gpu = Gpu((Unpinnable if way == "bounced" else CudaDevice)(0), 1 << 18, 64)
        for lane in (gpu.save, gpu.load):
            direct = Speeds(1e30, 1.0, 0.0) if way == "direct" else Speeds(1.0, 1e30, 0.0)
            lane.speeds = replace(direct, groups=lane.speeds.groups)
        found[way] = gpu
    return found


def moved(layers: list[torch.Tensor], blocks: int, memory: memoryview, gpu: Gpu, way: str) -> CudaMover:
    mover = cuda_mover(layers, blocks, memory, gpu)
    assert mover is not None
    assert mover.arena.wait() == (way != "bounced")
    return mover


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_lands_where_torch_puts_it(gpus: dict[str, Gpu], layout: str, way: str) -> None:
    for heads in HEADS.values():
        for tokens, content in ((1, 3), (3, 5), (5, 18), (16, 64), (16, 576)):
            for dtype in (torch.bfloat16, torch.uint8, torch.float32):
                layers = laid_out(layout, 3, heads, tokens, content, dtype, "cuda")
                for part in (None, range(1, 2)):
                    assert not differs(layers, PLAIN, part, lambda *args: moved(*args, gpus[way], way))


@pytest.mark.parametrize("way", WAYS)
def test_a_save_waits_for_what_computes_the_kv(gpus: dict[str, Gpu], way: str) -> None:
    """The KV is still being computed, on the caller's stream, when the call is made."""
    kv = torch.zeros((2, 64, 1024), dtype=torch.float32, device="cuda")
    memory = mmap.mmap(-1, 64 * 2 * 4096)
    mover = moved(list(kv), 64, memoryview(memory), gpus[way], way)
    slow = torch.randn((4096, 4096), device="cuda")
    from kvcore.transfer.plan import Run

    for step in range(1, 6):
        for _ in range(20):
            slow = torch.nn.functional.normalize(slow @ slow)
        kv.copy_((slow[:1, :1] * 0 + step).expand_as(kv))
        mover.gather([Run(0, 0, tuple(range(64)))])
        assert set(torch.frombuffer(memory, dtype=torch.float32).tolist()) == {float(step)}


def test_paged_cache_with_save_and_load_at_once() -> None:
    """Through the public face, over a pinned arena, both directions from several threads."""
    layers = list(torch.randint(0, 255, (16, 256, 32768), dtype=torch.uint8, device="cuda"))
    targets = [torch.zeros_like(t) for t in layers]
    layout = ObjectLayout(8, 1, (32768,) * 16, "uint8", 1)
    arena = Arena(32 * layout.nbytes)
    save, load = PagedCache([layers], [layout], 0, arena), PagedCache([targets], [layout], 0, arena)
    assert type(save._movers[0][0]).__name__ == "CudaMover"
    copies = [
        Copy(0, i * layout.nbytes, arena.generation(i * layout.nbytes), 0, tuple(range(8 * i, 8 * i + 8)))
        for i in range(32)
    ]
    save.store(copies)
    threads = [threading.Thread(target=work, args=(copies,)) for work in (save.store, load.load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(layers, targets, strict=True))
    del save, load, threads
    gc.collect()
    arena.close()


def test_compute_sanitizer_finds_nothing() -> None:
    """Memory errors of the kernels; where the CUDA toolkit is installed."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if os.environ.get("KVCORE_TEST_SANITIZED"):
        pytest.skip("this is the run inside compute-sanitizer")
    if not os.access(tool, os.X_OK):
        pytest.skip("NOT CHECKED: there is no compute-sanitizer here (it comes with the CUDA toolkit)")
    command = [tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable, "-m", "pytest", "-q"]
    command += ["-k", "every_byte and (LBHNC or LHBNC)", "--timeout", "1200", str(HERE / "gpu_checks.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "KVCORE_TEST_SANITIZED": "1"}
    )
    assert done.returncode == 0, done.stdout[-4000:]
