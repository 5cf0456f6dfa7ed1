"""What runs on a GPU's streams is in order whichever way the device runs it, and each wait there is needed."""

import gc
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cuda_host
import numpy as np
import pytest
import torch
from cuda_fake import FakeDevice

from kvcore.api import ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer import Copy, PagedCache
from kvcore.transfer import cuda as cuda_package
from kvcore.transfer.cuda import lanes
from kvcore.transfer.cuda.device import CudaDevice
from kvcore.transfer.cuda.lanes import Gpu, Speeds, Way
from kvcore.transfer.cuda.mover import CudaMover, cuda_mover
from kvcore.transfer.plan import Run

WAYS: tuple[Way, ...] = ("direct", "staged", "bounced")
LAYERS, BLOCKS, PER_OBJECT, BLOCK_BYTES = 3, 30, 2, 48
OBJECT_BYTES = LAYERS * PER_OBJECT * BLOCK_BYTES
OBJECTS = 14
SEEDS = 12


class World:
    """KV, an arena, and a mover on a device that runs things in the order of a seed. A call takes seven pieces."""

    def __init__(self, way: Way, seed: int, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice(seed, pin_error=MemoryError("no") if way == "bounced" else None)
        rng = np.random.default_rng(seed)
        self.kv = torch.from_numpy(rng.integers(0, 255, (LAYERS, BLOCKS, BLOCK_BYTES), np.uint8))
        self.arena = rng.integers(0, 255, OBJECTS * OBJECT_BYTES, np.uint8)
        self.device.hold(self.kv)
        self.gpu = Gpu(self.device, 2 * OBJECT_BYTES, 2 * PER_OBJECT)
        speeds = replace(Speeds(1e30, 1.0, 0.0) if way == "direct" else Speeds(1.0, 1e30, 0.0), groups=2)
        self.gpu.save.speeds = self.gpu.load.speeds = speeds
        mover = cuda_mover(list(self.kv), PER_OBJECT, memoryview(self.arena), self.gpu)
        assert mover is not None
        self.mover: CudaMover = mover
        assert mover.arena.wait() == (way != "bounced")
        ids = rng.permutation(BLOCKS).tolist()
        self.runs = [Run(i * OBJECT_BYTES, 0, ids[2 * i : 2 * i + 2]) for i in range(OBJECTS)]

    def objects(self) -> bytes:
        """What the arena should hold: the runs' blocks as they are now."""
        return b"".join(self.kv[:, run.ids].numpy().tobytes() for run in self.runs)


def saves(world: World) -> bool:
    """Twice: a step computes KV, the KV is saved, the slots are published and later given to others."""
    good = True
    for step in range(2):
        computed = torch.randint(0, 255, world.kv.shape, dtype=torch.uint8)
        world.device.compute(lambda values=computed: world.kv.copy_(values))
        world.mover.gather(world.runs)
        good = good and world.arena.tobytes() == world.objects() and torch.equal(world.kv, computed)
        world.arena[:] = step  # somebody else's now
        world.device.finish()
        good = good and bool((world.arena == step).all())
    return good


def loads(world: World) -> bool:
    """Twice: a step still reads blocks that are to be filled, they are filled, the slots are given to others."""
    good = True
    for step in range(2):
        before, read = world.kv.clone(), torch.zeros_like(world.kv)
        world.device.compute(lambda into=read: into.copy_(world.kv))
        wanted = world.arena.tobytes()
        world.mover.scatter(world.runs)
        good = good and world.objects() == wanted  # the host says now that the blocks may be read
        world.arena[:] = np.random.default_rng(step).integers(0, 255, len(world.arena), np.uint8)
        world.device.finish()
        good = good and world.objects() == wanted and torch.equal(read, before)
    return good


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", [saves, loads])
def test_every_order_that_streams_allow_is_right(way: Way, work: Callable[[World], bool]) -> None:
    for seed in range(60):
        assert work(World(way, seed)), seed


class Careless(FakeDevice):
    """Drops the calls that come from one line of lanes.py; without one it only notes the lines."""

    def __init__(self, seed: int, *, dropped: int | None = None, pin_error: Exception | None = None) -> None:
        self.dropped = dropped
        self.lines: set[int] = set()
        super().__init__(seed, pin_error=pin_error)

    def _kept(self) -> bool:
        frame = sys._getframe(2)
        if frame.f_code.co_filename == lanes.__file__ and frame.f_code.co_name not in ("_seconds", "_drain"):
            self.lines.add(frame.f_lineno)
            return frame.f_lineno != self.dropped
        return True

    def record(self, event: Any, stream: Any) -> None:
        if self._kept():
            super().record(event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        if self._kept():
            super().wait(stream, event)

    def synchronize(self, event: Any) -> None:
        if self._kept():
            super().synchronize(event)


def careless(way: Way, seed: int, dropped: int | None = None) -> Careless:
    return Careless(seed, dropped=dropped, pin_error=MemoryError("no") if way == "bounced" else None)


def test_the_device_of_these_tests_has_the_methods_of_the_real_one() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in found if not name.startswith("_")}

    real = methods(CudaDevice)
    assert len(real) >= 12
    assert real.items() <= methods(FakeDevice).items()


def test_each_record_and_each_wait_is_needed() -> None:
    """Take away any one of them: some order of things gives wrong bytes. So the test above can fail, for each."""
    lines: dict[int, list[tuple[Way, Callable[[World], bool]]]] = {}
    for way in WAYS:
        for work in (saves, loads):
            device = careless(way, 0)
            assert work(World(way, 0, device))
            for line in device.lines:
                lines.setdefault(line, []).append((way, work))
    source = inspect.getsource(lanes).splitlines()
    assert len(lines) >= 13
    for line, cases in lines.items():
        for way, work in cases:
            right = all(work(World(way, seed, careless(way, seed, line))) for seed in range(SEEDS))
            assert not right, f"{way} {work.__name__} need no line {line}: {source[line - 1].strip()}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_call_allocates_nothing(way: Way, direction: str) -> None:
    world = World(way, 1)
    before = world.device.allocations
    getattr(world.mover, direction)(world.runs)
    getattr(world.mover, direction)(world.runs, range(1, 2))
    assert world.device.allocations == before


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written_after_a_call_has_failed(way: Way) -> None:
    """A launch fails in the middle of a call: what was queued before it is over when the caller hears of it."""
    for seed in range(20):
        world = World(way, seed)
        launch, left = world.device.launch, iter(range(3))

        def failing(*args: Any, launch: Any = launch, left: Any = left) -> None:
            if next(left, None) is None:
                raise RuntimeError("the device is gone")
            launch(*args)

        world.device.launch = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="is gone"):
            world.mover.gather(world.runs)
        world.arena[:] = 7
        world.device.finish()
        assert (world.arena == 7).all()
        world.device.launch = launch  # type: ignore[method-assign]
        assert saves(world)  # the next call finds the lane in order


def test_one_launch_for_all_layers_and_runs() -> None:
    """Of calls that fit: as large as the buffers are in reality."""
    device = FakeDevice(0)
    kv = torch.randint(0, 255, (32, 24, 64), dtype=torch.uint8)
    device.hold(kv)
    arena = np.zeros(6 * 32 * 4 * 64, np.uint8)
    mover = cuda_mover(list(kv), 4, memoryview(arena), Gpu(device, 1 << 20))
    assert mover is not None
    assert mover.arena.wait()
    runs = [Run(i * 32 * 4 * 64, 0, range(4 * i, 4 * i + 4)) for i in range(6)]
    device.launches.clear()
    for direction in (mover.gather, mover.scatter):
        direction(runs)
    assert len(device.launches) == 2


def test_the_way_is_measured_and_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of known speeds: kernels 24 GB/s from 24 thread blocks on, copies 50 GB/s and 2 us each."""
    device = FakeDevice(0)
    monkeypatch.setattr(lanes, "perf_counter", device.clock)
    gpu = Gpu(device, 8 << 20)
    for speeds in (gpu.save.speeds, gpu.load.speeds):
        assert speeds.direct == pytest.approx(24e9, rel=0.1)
        assert speeds.staged == pytest.approx(50e9, rel=0.1)
        assert speeds.span_s == pytest.approx(2e-6, rel=0.1)
        assert speeds.groups == 32
        assert speeds.way(64 << 20, 16) == "staged"
        assert speeds.way(1 << 20, 64) == "direct"  # layer by layer, in many small pieces
    assert Speeds(95e9, 100e9, 0.0).way(1 << 20, 1) == "staged"
    assert Speeds(105e9, 100e9, 0.0).way(1 << 20, 1) == "staged"  # no faster by more than a tenth
    assert Speeds(125e9, 100e9, 0.0).way(1 << 20, 1) == "direct"


@pytest.mark.parametrize(
    "right", ["row.index * layer.block_bytes", "row.block * layer.stride", "run<true>", "run<false>"]
)
def test_a_device_on_which_a_kernel_is_wrong_is_not_used(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cuda_host.SOURCE.read_text()
    wrong = "0" if "row" in right else "(void)"
    library = cuda_host.compiled(source.replace(right, wrong))
    monkeypatch.setattr(cuda_host, "kernels", lambda: library)
    with pytest.raises(RuntimeError, match="does not copy right"):
        Gpu(FakeDevice(0), 4096, 16)


def test_registered_memory_with_other_addresses_is_left_to_the_copy_engine() -> None:
    device = FakeDevice(0, shared_addresses=False)
    world = World("direct", 0, device)
    before = device.copies
    assert saves(world)
    assert device.copies - before > OBJECTS  # one for each object, beside the tables


def test_an_arena_is_pinned_once_and_unpinned_before_it_is_unmapped() -> None:
    device = FakeDevice(0)
    arena = Arena(1 << 20)
    kv = torch.randint(0, 255, (2, BLOCKS, 64), dtype=torch.uint8)
    device.hold(kv)
    gpu = Gpu(device, 4096)
    first, second = (cuda_mover(list(kv), 1, arena.buffer, gpu) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.arena is second.arena
    assert first.arena.wait()
    assert device.pinned.keys() == {arena.address}
    seen = []
    unpin = device.unpin

    def watched(address: int) -> None:
        seen.append(str(address and mapped(address)))
        unpin(address)

    device.unpin = watched  # type: ignore[method-assign]
    pinned = weakref.ref(first.arena)
    del first, second
    gc.collect()
    last = cuda_mover(list(kv), 1, arena.buffer, gpu)
    assert last is not None
    assert last.arena is pinned(), "pinned anew for each call"
    arena.close()
    del arena
    gc.collect()
    assert not seen
    del last
    gc.collect()
    deadline = time.monotonic() + 60
    while device.pinned and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == ["True"]
    assert not device.pinned


def mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)


def test_an_arena_that_is_not_pinned_yet_serves_meanwhile() -> None:
    """Pinning takes long: copies go through the pinned buffers until it is done, and then straight."""
    go = threading.Event()

    class Slow(FakeDevice):
        def pin(self, address: int, nbytes: int) -> None:
            assert go.wait(60)
            super().pin(address, nbytes)

    device = Slow(0)
    kv = torch.randint(0, 255, (2, 8, 64), dtype=torch.uint8)
    device.hold(kv)
    gpu = Gpu(device, 4096)
    gpu.save.speeds = Speeds(1.0, 1e30, 0.0)
    arena = np.zeros(256, np.uint8)
    mover = cuda_mover(list(kv), 1, memoryview(arena), gpu)
    assert mover is not None
    for ready in (False, True):
        assert mover.arena.ready is ready
        before = device.copies
        mover.gather([Run(0, 0, (3,))])
        assert device.copies - before == (2 if ready else 1)  # the table, and the piece itself
        assert arena[:128].tobytes() == kv[:, 3].numpy().tobytes()
        arena[:] = 0
        go.set()
        assert mover.arena.wait(60)


def test_an_arena_that_cannot_be_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(0, pin_error=MemoryError("cudaErrorMemoryAllocation"))
    with caplog.at_level(logging.WARNING, "kvcore.transfer"):
        world = World("bounced", 0, device)
        assert saves(world)
        assert loads(world)
    assert [r.message for r in caplog.records if "cannot be pinned" in r.message] == [
        f"the arena of {OBJECTS * OBJECT_BYTES / 1024:.4g} KiB cannot be pinned, so KV crosses through a small pinned "
        "buffer, which is slower: cudaErrorMemoryAllocation. Make l1.size smaller, or give the container more memory"
    ]


def test_both_directions_at_once_from_many_threads() -> None:
    """Saves and loads of many threads share a GPU's lanes."""

    class Locked(FakeDevice):
        lock = threading.RLock()

    for name in ("record", "wait", "synchronize", "copy", "launch"):

        def locked(self: Any, *args: Any, name: str = name) -> None:
            with Locked.lock:
                getattr(FakeDevice, name)(self, *args)

        setattr(Locked, name, locked)
    world = World("staged", 3, Locked(3))
    other = torch.zeros_like(world.kv)
    world.device.hold(other)
    into = cuda_mover(list(other), PER_OBJECT, memoryview(world.arena), world.gpu)
    assert into is not None
    world.mover.gather(world.runs)
    failed: list[BaseException] = []

    def repeat(work: Callable[[Sequence[Run]], None]) -> None:
        try:
            for _ in range(20):
                work(world.runs)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(w,)) for w in (world.mover.gather, into.scatter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(torch.equal(other[:, run.ids], world.kv[:, run.ids]) for run in world.runs)


class OnCuda:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda:0")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index]


def test_paged_cache_takes_the_kernels_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(5)
    gpu = Gpu(device, 4096)
    monkeypatch.setattr(cuda_package, "obstacle", lambda kind: None if kind == "cuda" else "no")
    monkeypatch.setattr(cuda_package, "gpu_of", lambda index: gpu)
    kv = torch.randint(0, 255, (2, 8, 64), dtype=torch.uint8)
    device.hold(kv)
    arena = Arena(1 << 20)
    layout = ObjectLayout(2, 2, (64, 64), "uint8", 1)
    cache = PagedCache([[OnCuda(t) for t in kv]], [layout], 1, arena)  # type: ignore[misc]
    copies = [Copy(0, i * 4096, arena.generation(i * 4096), 0, ids) for i, ids in enumerate([(3, -1), (5, 7)])]
    device.launches.clear()
    cache.store(copies)
    assert device.launches
    before = kv.clone()
    kv.zero_()
    assert cache.load(copies) == set()
    assert torch.equal(kv[:, [3, 5, 7]], before[:, [3, 5, 7]])
    assert int(kv[:, [0, 1, 2, 4, 6]].count_nonzero()) == 0
    arena.bump([4096])
    assert cache.load(copies) == {5, 7}
    del cache
    gc.collect()
    arena.close()


def test_a_gpu_is_made_ready_before_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(cuda_package, "obstacle", lambda kind: None if kind == "cuda" else "no")
    monkeypatch.setattr(cuda_package, "gpu_of", made.append)
    layer = torch.zeros(4, 8, dtype=torch.uint8)
    cuda_package.prepare([OnCuda(layer), OnCuda(layer), layer])  # type: ignore[list-item]
    assert made == [0]


def test_what_the_kernels_do_not_serve_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_package, "_said", set())
    monkeypatch.setattr(cuda_package, "_gpus", {})
    layer = torch.zeros(4, 8, dtype=torch.uint8)
    memory = memoryview(bytearray(64))
    meta = layer.to("meta")  # any device that is neither the host nor CUDA
    for _ in range(2):
        assert cuda_package.cuda_movers([meta], 1, memory) is None
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert cuda_package.cuda_movers([OnCuda(layer)], 1, memory) is None  # type: ignore[list-item]
    monkeypatch.setattr(torch.version, "hip", None)
    with monkeypatch.context() as patch:
        patch.setenv("KVCORE_CUDA_KERNELS", "off")
        assert cuda_package.cuda_movers([OnCuda(layer)], 1, memory) is None  # type: ignore[list-item]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        assert cuda_package.cuda_movers([OnCuda(layer)], 1, memory) is None  # type: ignore[list-item]
    said = "\n".join(r.message for r in caplog.records)
    assert said.count("not for meta") == 1
    assert "built for ROCm" in said
    assert "KVCORE_CUDA_KERNELS says so" in said
    assert "pip install 'kvcore[cuda]'" in said
    assert cuda_package.cuda_movers([layer], 1, memory) is None  # host memory: nothing to say
    assert len(caplog.records) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: make test-gpu runs on it")
def test_without_a_gpu_torch_copies_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy is installed, the driver is not: what it reports is in the log, and nothing is raised."""
    monkeypatch.setattr(cuda_package, "_said", set())
    monkeypatch.setattr(cuda_package, "_gpus", {})
    tensors = [OnCuda(torch.zeros(4, 8, dtype=torch.uint8))]
    for _ in range(2):
        assert cuda_package.cuda_movers(tensors, 1, memoryview(bytearray(64))) is None  # type: ignore[arg-type]
    [record] = caplog.records
    assert "cuda:0 is copied by torch operations, which is slower: cuda" in record.message
