"""Layer by layer: no layer is computed before its load is over, none is saved before it is computed, and no object is
published of which a layer is missing."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.api import ConfigError, ObjectLayout
from kvcore.l1 import Arena
from kvcore.transfer import Copy, PagedCache
from kvcore_vllm import _compat, modes
from kvcore_vllm.copier import END, Copier, Layers
from kvcore_vllm.layerwise import BATCHES, LoadsAhead, SavesAlong, batches
from kvcore_vllm.metadata import Attach, Load, Metadata, Save
from kvcore_vllm.options import Options
from kvcore_vllm.worker import WorkerHalf

pytestmark = pytest.mark.vllm

NAMES = tuple(f"layer.{i}" for i in range(12))
BLOCKS, SIZE = 10, 64


@given(st.integers(0, 200))
def test_batches_hold_each_layer_once_in_order(count: int) -> None:
    found = batches(count)
    assert [layer for piece in found for layer in piece] == list(range(count))
    assert len(found) <= BATCHES


@given(st.data())
def test_no_layer_is_saved_before_it_is_computed_and_each_is_saved_once(data: st.DataObject) -> None:
    groups = [[f"{g}.{i}" for i in range(data.draw(st.integers(1, 20)))] for g in range(data.draw(st.integers(1, 3)))]
    told = data.draw(st.lists(st.sampled_from([name for g in groups for name in g]), max_size=60))
    computed: set[str] = set()
    saved: list[str] = []
    over = False

    def save(layers: Layers) -> None:
        names = groups[layers.group][layers.layers.start : layers.layers.stop]
        assert over or computed.issuperset(names)
        saved.extend(names)

    along = SavesAlong(groups, save)
    for name in told:
        computed.add(name)
        along.computed(name)
    along.computed("of another connector")
    over = True
    along.end()
    assert sorted(saved) == sorted(name for g in groups for name in g)


def test_a_save_that_could_not_begin_is_tried_again_at_the_end() -> None:
    calls: list[Layers] = []

    def save(layers: Layers) -> None:
        calls.append(layers)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")

    along = SavesAlong([["a", "b"]], save)
    with pytest.raises(RuntimeError):
        along.computed("a")
    along.computed("b")
    along.end()
    assert calls[1:] == [Layers(0, range(2))]


class Steps:
    """Copies of loads that go on by one layer each time they are told to."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.over: list[tuple[int, int]] = []
        self.copier = Copier(self.load, lambda job, layers: True, lambda: None, lambda: None)

    def load(self, job: Load, layers: Layers | None) -> set[int]:
        assert layers is not None
        assert self.go.acquire(timeout=60)
        self.over.append((job.id, layers.layers.start))
        return {job.id} if layers.layers.start == 2 else set()


@pytest.fixture
def steps() -> Any:
    steps = Steps()
    yield steps
    for _ in range(100):
        steps.go.release()
    steps.copier.close()


def test_a_layer_waits_for_its_own_load_and_for_no_later_one(steps: Steps) -> None:
    jobs = [Load(7, "r", "a", (), frozenset({7, 8})), Load(9, "s", "a", (), frozenset({9}))]
    ahead = LoadsAhead(steps.copier, jobs, NAMES[:4], None)
    for layer in range(4):
        waiting = threading.Thread(target=ahead.wait, args=(NAMES[layer],), daemon=True)
        waiting.start()
        steps.go.release()
        waiting.join(0.02)
        assert waiting.is_alive()  # the second request's is not over
        steps.go.release()
        waiting.join(60)
        assert not waiting.is_alive()
        assert steps.over[-1] == (9, layer)
    ahead.wait("of another connector")
    assert ahead.end() == ([(jobs[0], {7}), (jobs[1], {9})], [])


def test_loads_have_failed_where_a_layer_was_not_waited_for(steps: Steps) -> None:
    for _ in range(4):
        steps.go.release()
    job = Load(7, "r", "a", (), frozenset({7, 8}))
    ahead = LoadsAhead(steps.copier, [job], NAMES[:4], None)
    for layer in (0, 1, 3):
        ahead.wait(NAMES[layer])
    assert ahead.end() == ([(job, {7, 8})], [NAMES[2]])


def test_a_save_in_parts_ends_with_the_last_and_fails_with_any() -> None:
    copied: list[tuple[int, Layers | None]] = []

    def save(job: Save, layers: Layers | None) -> bool:
        copied.append((job.id, layers))
        if job.id == 3:
            raise OSError("gone")
        return job.id != 2

    copier = Copier(lambda job, layers: set(), save, lambda: None, lambda: None)
    first, second = Layers(0, range(2)), Layers(0, range(2, 4))
    jobs = [Save(i, "r", "a", ()) for i in range(5)]
    for job in jobs:
        copier.submit("save", job, None, first, last=False)
    copier.reach(copier.submit("save", Save(77, "other", "a", ()), None))
    assert copier.saving("r")
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(77, True)]
    for job in jobs:
        copier.submit("save", job, None, second, last=False)
        if job.id == 4:
            copier.drop(job)
        else:
            copier.submit("save", job, None, END)
    copier.flush(range(5))
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(0, True), (1, True), (2, False), (3, False), (4, False)]
    assert [layers for i, layers in copied if i == 2] == [first]  # what has failed is not copied on
    assert [layers for i, layers in copied if i == 0] == [first, second]
    copier.submit("save", jobs[2]._replace(id=6), None)
    copier.flush([6])
    assert [(job.id, ok) for job, ok in copier.take()[1]] == [(6, True)]
    copier.close()


class Worker:
    """A worker's half over a real arena and KV of 12 layers, and steps as vLLM makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: int = 1) -> None:
        names = [NAMES[g::groups] for g in range(groups)]
        config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=n) for n in names])
        monkeypatch.setattr(_compat, "tensor_rank", lambda: 0)
        self.arena = Arena(1 << 20)
        self.half = WorkerHalf(SimpleNamespace(), config)
        monkeypatch.setattr(self.half._arenas, "_attach", lambda attach: Mapped(self.arena))
        self.kv = {name: torch.randint(1, 255, (BLOCKS, SIZE), dtype=torch.uint8) for name in NAMES}
        self.half.register(self.kv)
        layout = ObjectLayout(2, 1, (SIZE,) * (12 // groups), "uint8", 1)
        self.attach = Attach("a", {"token": "a"}, (layout,) * groups, tuple(names))
        self.calls: list[tuple[str, range | None]] = []
        for op in ("load", "store"):
            self.watch(monkeypatch, op)

    def watch(self, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
        original = getattr(PagedCache, op)

        def watched(cache: PagedCache, copies: Any, layers: range | None = None) -> Any:
            self.calls.append((op, layers))
            return original(cache, copies, layers)

        monkeypatch.setattr(PagedCache, op, watched)

    def step(self, meta: Metadata, *, silent: tuple[str, ...] = (), full: bool = False, change: Any = None) -> Any:
        """One step: every layer is told of but the silent ones, and writes what was computed into block 9. What it read
        of block 1, and the blocks that are to be computed again."""
        from vllm.config import CUDAGraphMode

        mode = CUDAGraphMode.FULL if full else CUDAGraphMode.NONE
        metadata = dict.fromkeys(NAMES, object())
        forward = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode, ubatch_slices=None)
        meta.arena, meta.attach = "a", self.attach
        self.half.begin(meta)
        self.half.load(meta, forward)
        read = []
        for name in NAMES:
            if name not in silent and self.half.loading:
                self.half.before_layer(name)
            read.append(bytes(self.kv[name][1].tolist()))
            self.kv[name][9] = NAMES.index(name) + 100
            if change is not None:
                change(name)
            if name not in silent and self.half.saving:
                self.half.after_layer(name)
        self.half.save(meta)
        self.half.results(meta)
        return read, self.half.bad_blocks()

    def reports(self) -> dict[str, dict[int, bool]]:
        """Loads and saves that have ended, and whether they are good."""
        found: dict[str, dict[int, bool]] = {"loads": {}, "saves": {}}
        self.half._copier.flush(list(range(10)))
        self.half.results(Metadata())
        report = self.half.report(Metadata())
        if report is not None:
            found["loads"] = {i: not t.failed for i, t in report.loads.items()}
            found["saves"] = {i: not t.failed for i, t in report.saves.items()}
        return found


class Mapped:
    """A mapped arena."""

    def __init__(self, arena: Arena) -> None:
        self.buffer, self.generation = arena.buffer, arena.generation

    def watch(self, lost: Any) -> None:
        """Nobody is lost."""

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Worker(monkeypatch)
    yield made
    made.half.shutdown()
    made.arena.close()


def load_of(worker: Worker, slot: int = 0) -> Load:
    return Load(5, "r", "a", (Copy(0, slot, worker.arena.generation(slot), 0, (1, 2)),), frozenset({1, 2}))


def save_of(worker: Worker, plan: int = 6, slot: int = 8192, group: int = 0) -> Save:
    return Save(plan, "r", "a", (Copy(group, slot, worker.arena.generation(slot), 0, (9, 3)),))


def stored(worker: Worker, slot: int = 8192, names: tuple[str, ...] = NAMES) -> bool:
    """Does the slot hold what the step computed in block 9, and block 3?"""
    wanted = b"".join(bytes([NAMES.index(n) + 100]) * SIZE + bytes(worker.kv[n][3].tolist()) for n in names)
    return bytes(worker.arena.buffer[slot : slot + len(wanted)]) == wanted


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_a_step_reads_what_was_loaded_and_saves_what_it_computed(worker: Worker, beside: bool) -> None:
    content = bytes(range(1, 25))
    for i, value in enumerate(content):
        worker.arena.buffer[i * SIZE : (i + 1) * SIZE] = bytes([value]) * SIZE
    meta = Metadata(beside, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    read, bad = worker.step(meta)
    assert read == [bytes([content[2 * i]]) * SIZE for i in range(12)]
    assert bad == set()
    assert worker.reports() == {"loads": {5: True}, "saves": {6: True}}
    assert stored(worker)
    assert [c for c in worker.calls if c[0] == "load"] == [("load", range(i, i + 2)) for i in range(0, 12, 2)]
    assert [c for c in worker.calls if c[0] == "store"] == [("store", range(i, i + 2)) for i in range(0, 12, 2)]
    assert worker.half.faults == {}


@pytest.mark.parametrize("how", ["one graph", "newer runner"])
def test_where_vllm_will_not_tell_of_layers_a_step_copies_whole(worker: Worker, how: str) -> None:
    worker.arena.buffer[: 24 * SIZE] = b"\x07" * (24 * SIZE)
    meta = Metadata(False, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    if how == "newer runner":
        original = worker.half.load
        worker.half.load = lambda meta, forward: original(  # type: ignore[method-assign]
            meta, SimpleNamespace(**{**vars(forward), "attn_metadata": None})
        )
    read, bad = worker.step(meta, silent=NAMES, full=how == "one graph")
    assert read == [b"\x07" * SIZE] * 12
    assert bad == set()
    assert worker.reports() == {"loads": {5: True}, "saves": {6: True}}
    assert stored(worker)
    assert ("load", None) in worker.calls


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_a_load_that_fails_in_the_middle_leaves_nothing_of_its_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    original = PagedCache.load

    def fails(cache: PagedCache, copies: Any, layers: range | None = None) -> set[int]:
        if layers == range(4, 6):
            raise OSError("planted")
        return original(cache, copies, layers)

    monkeypatch.setattr(PagedCache, "load", fails)
    meta = Metadata(beside, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    _, bad = worker.step(meta)
    assert bad == {1, 2}
    assert worker.reports() == {"loads": {5: False}, "saves": {6: False}}
    assert worker.half.faults == {"load:OSError": 1}
    monkeypatch.undo()
    meta = Metadata(beside, True, True, saves=[save_of(worker, 7)])
    worker.half._report = type(worker.half._report)()
    monkeypatch.setattr(_compat, "tensor_rank", lambda: 0)
    worker.step(meta)
    assert worker.reports()["saves"] == {7: True}
    assert stored(worker)


def test_saves_whose_thread_cannot_start_have_failed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        worker.step(Metadata(True, False, True, saves=[save_of(worker, 6), save_of(worker, 7)]))
    assert worker.reports()["saves"] == {6: False, 7: False}
    worker.step(Metadata(True, False, True, saves=[save_of(worker, 8)]))
    assert worker.reports()["saves"] == {8: True}
    assert stored(worker)


def test_a_slot_that_is_freed_in_the_middle_of_a_step(worker: Worker) -> None:
    def change(name: str) -> None:
        if name == NAMES[5]:
            worker.arena.bump([0])

    meta = Metadata(False, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    # The copies run ahead; the last ones wait for the slot to be freed.
    freed, original = threading.Event(), worker.half._copy_in

    def copy(job: Load, layers: Layers | None = None) -> set[int]:
        if layers is not None and layers.layers.start == 6:
            assert freed.wait(60)
        return original(job, layers)

    worker.half._loader._load = copy

    def change_and_tell(name: str) -> None:
        change(name)
        if name == NAMES[5]:
            freed.set()

    _, bad = worker.step(meta, change=change_and_tell)
    assert bad == {1, 2}
    assert worker.reports() == {"loads": {5: False}, "saves": {6: False}}


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_in_the_middle_is_not_published_and_others_are(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    original = PagedCache.store

    def fails(cache: PagedCache, copies: Any, layers: range | None = None) -> None:
        if layers == range(4, 6) and copies[0].slot == 8192:
            raise OSError("planted")
        original(cache, copies, layers)

    monkeypatch.setattr(PagedCache, "store", fails)
    saves = [save_of(worker), save_of(worker, 7, 16384)]
    worker.step(Metadata(beside, True, True, saves=saves))
    assert worker.reports()["saves"] == {6: False, 7: True}
    assert stored(worker, 16384)
    assert worker.half.faults == {"save:OSError": 1}


def test_after_a_layer_that_vllm_is_silent_about_loads_are_whole(worker: Worker) -> None:
    worker.arena.buffer[: 24 * SIZE] = b"\x07" * (24 * SIZE)
    meta = Metadata(False, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    _, bad = worker.step(meta, silent=(NAMES[3],))
    assert bad == {1, 2}
    assert worker.reports() == {"loads": {5: False}, "saves": {6: False}}
    assert worker.half.faults == {"load:RuntimeError": 1}
    meta = Metadata(False, True, True, loads=[load_of(worker)], saves=[save_of(worker)])
    read, bad = worker.step(meta, silent=(NAMES[3],))
    assert (read, bad) == ([b"\x07" * SIZE] * 12, set())
    assert worker.reports() == {"loads": {5: True}, "saves": {6: True}}
    assert stored(worker)


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_each_group_has_its_own_layers(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    worker = Worker(monkeypatch, groups=3)
    saves = [Save(6, "r", "a", tuple(save_of(worker, slot=8192 * g, group=g).copies[0] for g in range(3)))]
    worker.step(Metadata(beside, False, True, saves=saves))
    assert worker.reports()["saves"] == {6: True}
    assert all(stored(worker, 8192 * g, NAMES[g::3]) for g in range(3))
    assert len(worker.calls) == 12
    assert worker.half._counts["kvcore_save_bytes_total"] == 12 * 2 * SIZE  # each once
    worker.half.shutdown()
    worker.arena.close()


MODES = [
    # layerwise, load, save, role, groups, overlapped, cpu
    # -> loads beside, saves beside, loads and saves by layer, loads as objects come
    (("auto", "auto", "auto", "both", 1, False, True), (False, False, False, False, True)),
    (("on", "auto", "auto", "both", 1, False, True), (False, False, True, True, False)),
    (("on", "auto", "auto", "both", 3, False, True), (True, False, False, True, False)),
    (("on", "async", "async", "both", 1, False, True), (True, True, False, True, True)),
    (("off", "sync", "sync", "both", 1, False, False), (False, False, False, False, False)),
    (("auto", "auto", "auto", "both", 1, True, False), (True, True, False, False, True)),
    (("auto", "auto", "auto", "producer", 1, True, False), (True, True, False, True, True)),
    (("auto", "sync", "auto", "both", 1, False, False), (False, True, True, False, False)),
    (("on", "auto", "auto", "both", 1, True, False), (True, True, False, True, True)),
    (("on", "auto", "auto", "both", 1, False, False), (False, True, True, True, False)),
]


@pytest.mark.parametrize(("given_", "expected"), MODES)
def test_modes(given_: Any, expected: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layerwise, load, save, role, groups, overlapped, cpu = given_
    monkeypatch.setattr(_compat, "on_cpu", lambda: cpu)
    config = config_of(role, overlapped, False)
    found = modes.resolve(Options(layerwise=layerwise, load=load, save=save), config, groups, True)
    assert found == expected


def test_what_does_not_come_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "on_cpu", lambda: False)
    for recomputes in (True, False):
        assert modes.resolve(Options(), config_of("both", True, False), 1, recomputes).load_early == recomputes


def test_microbatches_compute_a_layer_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="enable_dbo"):
        modes.resolve(Options(layerwise="on"), config_of("both", False, True), 1, True)
    assert not modes.resolve(Options(load="sync"), config_of("producer", False, True), 1, True).save_layers


def config_of(role: str, overlapped: bool, split: bool) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=overlapped),
        parallel_config=SimpleNamespace(use_ubatching=split),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=role != "producer"),
    )


def test_graphs_are_piecewise_where_every_step_is_to_be_layer_by_layer() -> None:
    from kvcore_vllm.connector import KVCoreConnector

    for layerwise, wanted in (("on", True), ("auto", False), ("off", False)):
        assert KVCoreConnector.requires_piecewise_for_cudagraph({"kvcore.layerwise": layerwise}) == wanted
    assert not KVCoreConnector.requires_piecewise_for_cudagraph({})
