"""The workers' half of the connector: copies between the paged KV of one rank and the shared arena, by plan."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvcore.api import ObjectLayout
from kvcore.engine import attach_arena
from kvcore.engine.parts import Part
from kvcore.transfer import Copy, PagedCache
from kvcore.transfer.cuda import prepare
from kvcore_vllm import _compat
from kvcore_vllm.arenas import Arenas
from kvcore_vllm.copier import END, Copier, Layers
from kvcore_vllm.faults import Guarded, guarded
from kvcore_vllm.layerwise import LoadsAhead, SavesAlong
from kvcore_vllm.layout import by_block, describe
from kvcore_vllm.metadata import Attach, Load, Metadata, Save, Tally, WorkerLayout, WorkerMetadata
from kvcore_vllm.model_spec import group_layers
from kvcore_vllm.stats import KVCoreStats

IDLE_WAIT_S = 0.001
"""How long a step that computes nothing waits for a copy, instead of taking the copy's core away."""


class WorkerHalf(Guarded):
    """One rank's copies. After `register` no method raises: a copy that fails is reported as failed."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__()
        self._vllm_config = vllm_config
        self._layers = group_layers(kv_cache_config)
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._tensors: dict[str, Any] = {}
        self._layout: WorkerLayout | None = None
        self._objects: tuple[ObjectLayout, ...] = ()
        self._arenas = Arenas(self._mapped, self._paged)
        self._part = Part(0, 1, 0)
        self._copier = Copier(self._copy_in, self._copy_out, self._own_stream, self._synchronize)
        # Loads that a step waits for do not queue behind saves that nobody does.
        self._loader = Copier(self._copy_in, self._copy_out, self._own_stream, self._synchronize)
        self._ahead: LoadsAhead | None = None
        self._along: SavesAlong | None = None
        self._broken: set[int] = set()
        self._hooked = True
        self._report = WorkerMetadata()
        self._bad_blocks: set[int] = set()
        self._lost: dict[int, set[int]] = {}
        """Loads of which parts could not begin -> the blocks of these."""
        self._void: set[int] = set()
        """Loads whose KV may not be used any more."""
        self._recved: set[str] = set()
        self._failed_recv: set[str] = set()
        self._held: set[str] = set()
        self._spoilt = False
        self._counting = threading.Lock()  # the copy thread counts too
        self._counts: dict[str, float] = {}
        self._counted_seconds = 0.0

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The paged KV, one tensor per layer. Raises `ValueError` for a shape that is not block by block."""
        for layers in self._layers:
            for name in layers:
                if name in kv_caches:
                    self._tensors[name] = by_block(kv_caches[name], self._num_blocks)
        prepare(self._tensors.values())

    def layout(self) -> WorkerLayout:
        """What this rank's KV looks like."""
        if self._layout is None:
            self._layout = describe(self._tensors, self._vllm_config)
        return self._layout

    def shutdown(self) -> None:
        """End the copies and let go of the arenas. Idempotent."""
        self._copier.close()
        self._loader.close()
        self._arenas.close()
        self._tensors.clear()

    # -- a step, in vLLM's order -------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def begin(self, meta: Metadata) -> None:
        """Before any block is written: end the saves whose blocks may now belong to another request."""
        self._spoilt = False
        self._arenas.begin([*(load for load in meta.loads if load.first), *meta.saves])
        if meta.attach is not None:
            self._objects = meta.attach.layouts
            self._part = _part(meta.attach)
        self._arenas.follow(meta.arena, meta.attach)
        self._ahead, self._along, self._broken = None, None, set()
        if meta.save_layers and meta.saves:
            self._along = SavesAlong(self._layers, lambda layers: self._save_layers(meta, layers))
        self._void.update(meta.void)
        if meta.flush:
            self._copier.flush(meta.flush)

    @guarded(lambda: None)
    def load(self, meta: Metadata, forward: Any) -> None:
        """Start, or do, the step's loads. vLLM counts on each of them: one that cannot start has failed.

        `forward`: vLLM's context of the forward pass that comes.
        """
        if not meta.loads:
            return
        beside = [job for job in meta.loads if job.beside]
        inside = [job for job in meta.loads if not job.beside]
        try:
            event = self._event() if beside else None
            while beside:
                self._copier.submit("load", beside[0], event, last=beside[0].last)
                del beside[0]
            if inside and meta.load_layers and self._hooked and _compat.tells_layers(forward, self._layers[0]):
                self._ahead = LoadsAhead(self._loader, inside, self._layers[0], self._event())
                inside = []
            whole = bool(inside)
            while inside:
                self._loaded(inside[0], self._copy_in(inside[0]))
                del inside[0]
            if whole:
                self._synchronize()
        finally:
            for job in [*beside, *inside]:
                self._unstarted(job)

    def _unstarted(self, job: Load) -> None:
        if not job.last:
            self._lost[job.id] = self._lost.get(job.id, set()) | job.blocks
            return
        self._loaded(job, set(job.blocks))
        if job.beside:
            self._recved.add(job.req_id)

    @property
    def loading(self) -> bool:
        """Are layers loaded while the step computes?"""
        return self._ahead is not None

    @guarded(lambda: None)
    def before_layer(self, name: str) -> None:
        """A layer is about to be computed: wait for its load."""
        if self._ahead is not None:
            self._ahead.wait(name)

    @property
    def saving(self) -> bool:
        """Are layers saved while the step computes?"""
        return self._along is not None

    @guarded(lambda: None)
    def after_layer(self, name: str) -> None:
        """A layer has been computed: save it, or do so with the next."""
        if self._along is not None:
            self._along.computed(name)

    @guarded(lambda: None)
    def save(self, meta: Metadata) -> None:
        """All layers are computed. Start, or do, the saves; after a failed load nothing computed in the step may be
        kept."""
        self._end_loads()
        todo, along = list(meta.saves), self._along
        if not todo:
            return
        try:
            if along is not None and not self._spoilt:
                along.end()
            event = self._event() if meta.save_async and along is None else None
            while todo and not self._spoilt:
                if meta.save_async:
                    self._copier.submit("save", todo[0], event, END if along is not None else None)
                elif along is not None:
                    self._saved(todo[0], todo[0].id not in self._broken)
                else:
                    self._saved(todo[0], self._copy_out(todo[0]))
                del todo[0]
        finally:
            for job in todo:
                if meta.save_async and along is not None:
                    self._copier.drop(job)
                else:
                    self._saved(job, False)

    def _save_layers(self, meta: Metadata, layers: Layers) -> None:
        event = self._event() if meta.save_async else None
        for job in meta.saves:
            if meta.save_async:
                self._copier.submit("save", job, event, layers, last=False)
            elif job.id not in self._broken and not self._copy_out(job, layers):
                self._broken.add(job.id)

    def _end_loads(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        loaded, missed = ahead.end()
        for job, bad in loaded:
            self._loaded(job, bad)
        if missed:
            self._hooked = False
            text = f"vLLM did not tell when it computed {', '.join(missed)}: loads are whole from now on"
            self.fault("load", RuntimeError(text))

    @guarded(lambda: (set(), set(), set()))
    def results(self, meta: Metadata) -> tuple[set[str], set[str], set[str]]:
        """Requests whose held blocks are free, whose async load has ended, and of the latter those that failed as a
        whole (with several KV groups, where vLLM takes no block ids)."""
        self._end_loads()  # vLLM asks before `save` where it drafts tokens
        self._held.update(meta.held)
        began = time.perf_counter()
        loaded, saved = self._copier.take(IDLE_WAIT_S if meta.idle else 0.0)
        self.seconds -= time.perf_counter() - began
        for load, bad in loaded:
            self._recved.add(load.req_id)
            self._loaded(load, bad)
        for save, ok in saved:
            self._saved(save, ok)
        sent = {r for r in self._held if not self._copier.saving(r)}
        self._held -= sent
        recved, self._recved = self._recved, set()
        failed, self._failed_recv = self._failed_recv, set()
        return sent, recved, failed

    def bad_blocks(self) -> set[int]:
        """Blocks that did not load, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    @guarded(lambda: None)
    def report(self, meta: Metadata) -> WorkerMetadata | None:
        """Plans that ended on this rank since the last call."""
        report, self._report = self._report, WorkerMetadata()
        if meta.want_layout and self._tensors:
            report.layouts = {_compat.tensor_rank(): self.layout()}
        return report if report.loads or report.saves or report.layouts else None

    @guarded(lambda: None)
    def stats(self) -> KVCoreStats | None:
        """What this rank has copied since the last call."""
        with self._counting:
            counts, self._counts = self._counts, {}
        if not counts:
            return None
        counts["kvcore_worker_seconds_total"] = self.seconds - self._counted_seconds
        self._counted_seconds = self.seconds
        return KVCoreStats(data=counts)

    def _loaded(self, job: Load, bad: set[int]) -> None:
        bad = bad | self._lost.pop(job.id, set()) | (job.blocks if job.id in self._void else set())
        self._void.discard(job.id)
        self._arenas.end(job)
        self._tally(self._report.loads, job.id, not bad)
        if bad:
            self._spoilt = True
            if len(self._layers) > 1:
                self._failed_recv.add(job.req_id)
            else:
                self._bad_blocks |= bad

    def _saved(self, job: Save, ok: bool) -> None:
        self._arenas.end(job)
        self._tally(self._report.saves, job.id, ok)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy_in(self, job: Load, layers: Layers | None = None) -> set[int]:
        began = time.perf_counter()
        try:
            bad = set(job.missing)
            copies = self._copies(job, layers)
            if copies:
                bad |= self._arenas.cache(job.arena).load(copies, layers and layers.layers) & job.blocks
        except Exception as error:
            self.fault("load", error)
            return set(job.blocks)
        self._count("load", began, copies, layers)
        return bad

    def _copy_out(self, job: Save, layers: Layers | None = None) -> bool:
        began = time.perf_counter()
        try:
            copies = self._copies(job, layers)
            self._arenas.cache(job.arena).store(copies, layers and layers.layers)
        except Exception as error:
            self.fault("save", error)
            return False
        self._count("save", began, copies, layers)
        return True

    def _copies(self, job: Load | Save, layers: Layers | None) -> Sequence[Copy]:
        """This rank's copies of a job; only of the group of `layers`, where these are given."""
        copies = self._part.own(job.copies, len(self._layers))
        return copies if layers is None else [c for c in copies if c.group == layers.group]

    def _count(self, op: str, began: float, copies: Sequence[Copy], layers: Layers | None) -> None:
        some = slice(None) if layers is None else slice(layers.layers.start, layers.layers.stop)
        sizes = [sum(layout.layer_block_bytes[some]) for layout in self._objects]
        nbytes = sum(sizes[c.group] * sum(1 for b in c.blocks if b >= 0) for c in copies)
        with self._counting:
            for name, value in (("bytes", float(nbytes)), ("seconds", time.perf_counter() - began)):
                key = f"kvcore_{op}_{name}_total"
                self._counts[key] = self._counts.get(key, 0.0) + value

    def _paged(self, attach: Attach, arena: Any) -> PagedCache:
        groups = [[self._tensors[name] for name in layers] for layers in attach.layers]
        return PagedCache(groups, attach.layouts, _part(attach).rank, arena)

    @staticmethod
    def _mapped(attach: Attach) -> Any:
        return attach_arena(_part(attach).descriptor(attach.descriptor), _compat.tensor_rank())

    def _event(self) -> Any:
        """An event after all that the device has been told so far, or None where there are no streams."""
        device = self._device()
        if device is None:
            return None
        import torch

        event = torch.get_device_module(device).Event()
        event.record()
        return event

    def _own_stream(self) -> None:
        """Copies of the calling thread do not queue behind the model's kernels, nor these behind them."""
        device = self._device()
        if device is not None:
            import torch

            module = torch.get_device_module(device)
            module.set_device(device)
            module.set_stream(module.Stream())

    def _synchronize(self) -> None:
        device = self._device()
        if device is not None:
            import torch

            torch.get_device_module(device).current_stream().synchronize()

    def _device(self) -> Any:
        device = next(iter(self._tensors.values())).device if self._tensors else None
        return None if device is None or device.type == "cpu" else device

    @staticmethod
    def _tally(plans: dict[int, Tally], plan_id: int, ok: bool) -> None:
        plans[plan_id] = Tally(1, 0 if ok else 1)


def _part(attach: Attach) -> Part:
    """Where this rank's KV is, should there be several servers."""
    return Part.find(attach.descriptor, _compat.tensor_rank(), attach.layouts[0].ranks)
