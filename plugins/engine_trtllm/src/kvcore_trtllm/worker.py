"""The workers' half: copies between one rank's KV tensor and the shared arena, by plan."""

import threading
from collections import deque
from typing import Any

from kvcore.api import ArenaError, LayoutError
from kvcore.engine import ArenaView, attach_arena
from kvcore.transfer import PagedCache
from kvcore_trtllm import _compat
from kvcore_trtllm.copier import Copier
from kvcore_trtllm.faults import Guarded, guarded, logger
from kvcore_trtllm.metadata import Attach, Load, Metadata, Save, Tensor
from kvcore_trtllm.reports import Outbox, Report


class WorkerHalf(Guarded):
    """One rank's copies. No method but `register` raises.

    A load of which anything is missing is never reported as loaded, because TensorRT-LLM has no way to be told that it
    must compute after all: the request waits, and the load is tried again until it succeeds or the request ends.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._tensor: Any = None
        self._shape: Tensor | None = None
        self._lock = threading.Lock()
        self._arenas: dict[str, tuple[ArenaView, PagedCache]] = {}
        self._now = ""
        self._offered: frozenset[str] = frozenset()
        self._jobs: dict[str, int] = {}
        self._outbox: Outbox | None = None
        self._telling = threading.Lock()
        self._untold: deque[Report] = deque()
        self._event: Any = None
        self._begun: Metadata | None = None
        self._saved_of: Metadata | None = None
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._warned: set[int] = set()
        self._copier = Copier(
            self._copy_in, self._copy_out, self._own_stream, self._synchronize, self._loaded, self._saved
        )

    def register(self, tensor: Any) -> Tensor:
        """The KV cache, `[blocks, ...]`. Called again with another one, that one counts. Raises `LayoutError`."""
        if tensor.ndim < 2 or not tensor.is_contiguous():
            raise LayoutError(f"the KV cache tensor of shape {tuple(tensor.shape)} is not block by block in one piece")
        shape = Tensor(
            tensor[0].numel() * tensor.element_size(),
            "x".join(map(str, tensor.shape[1:])),
            str(tensor.dtype).removeprefix("torch."),
            tensor.element_size(),
        )
        with self._lock:
            self._tensor, self._shape = tensor, shape
            self._let_go(set(self._arenas))
        return shape

    def close(self) -> None:
        """End the copies and let go of the arenas. Idempotent."""
        self._copier.close()
        with self._lock:
            self._let_go(set(self._arenas))
            outbox, self._outbox = self._outbox, None
            self._tensor = None
        if outbox is not None:
            outbox.close()

    # -- a step, in TensorRT-LLM's order -----------------------------------------------------------------------------

    @guarded(lambda: None)
    def load(self, meta: Metadata) -> None:
        """Map what is new, and start the step's loads."""
        if meta is self._begun:
            return  # a step without a batch has no metadata of its own
        self._begun = meta
        self._reach(meta.reports)
        with self._lock:
            for arena in [job.arena for job in meta.loads] + [job.arena for job in meta.saves]:
                self._jobs[arena] = self._jobs.get(arena, 0) + 1
            self._now, self._offered = meta.arena, meta.offered
        if meta.attach is not None:
            try:
                self._map(meta.attach)
            except Exception as error:
                self.fault("attach", error)
        self._sweep()
        for load in meta.loads:
            self._copier.submit(load)

    def forward_ended(self) -> None:
        """The forward pass is queued on the current stream."""
        if self._tensor is not None and self._tensor.device.type != "cpu":
            import torch

            self._event = _compat.event_after(self._tensor, torch.cuda.current_stream())

    @guarded(lambda: None)
    def save(self, meta: Metadata, stream: Any) -> None:
        """Start the step's saves, behind the forward pass."""
        event, self._event = self._event, None
        if meta.saves and meta is not self._saved_of:
            self._saved_of = meta
            event = event if event is not None else _compat.event_after(self._tensor, stream)
            for job in meta.saves:
                self._copier.submit(job, event)

    @guarded(lambda: ([], []))
    def finished(self, ended: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        """See TensorRT-LLM: of what was ever passed in, the requests whose blocks are free, and those loaded."""
        self._finished.update(ended)
        self._started.update(loading)
        for request in ended:
            self._copier.forget(request)
        saved = {request for request in self._finished if not self._copier.busy(request)}
        # Of a request that has ended, nobody will read what a load has missed.
        loaded = {request for request in self._started if request in saved or self._copier.loaded(request)}
        self._finished -= saved
        self._started -= loaded
        for request in loaded:
            self._copier.taken(request)
            self._warned.discard(request)
        return sorted(saved), sorted(loaded)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy_in(self, job: Load) -> bool:
        try:
            bad = self._cache(job.arena).load(job.copies) if job.copies else set()
        except Exception as error:
            self.fault("load", error)
            return False
        if bad and job.request not in self._warned:
            self._warned.add(job.request)
            logger.error(
                "request %d: %d blocks that were promised are gone, because the engine stood still for longer than "
                "l1.lease. TensorRT-LLM cannot be told to compute them: the request waits until it is cancelled",
                job.request, len(bad),
            )  # fmt: skip
        return not bad

    def _copy_out(self, job: Save) -> bool:
        try:
            self._cache(job.arena).store(job.copies)
        except Exception as error:
            self.fault("save", error)
            return False
        return True

    def _loaded(self, job: Load, ok: bool) -> None:
        self._end(job.arena)
        self._report(Report(self._rank, "loaded", job.id, ok))

    def _saved(self, job: Save, ok: bool) -> None:
        self._end(job.arena)
        self._report(Report(self._rank, "saved", job.id, ok))

    def _reach(self, address: str) -> None:
        """Have an outbox that leads there."""
        if self._outbox is not None and self._outbox.address == address:
            return
        with self._telling:
            if self._outbox is not None:
                self._outbox.close()
                self._outbox = None
                self._untold.clear()
            try:
                self._outbox = Outbox(address)
            except OSError as error:
                self.fault("report", error)

    def _report(self, report: Report) -> None:
        """Tell it, and what could not be told before: the scheduler keeps a plan's objects until all ranks have."""
        with self._telling:
            self._untold.append(report)
            outbox = self._outbox
            try:
                while outbox is not None and self._untold:
                    outbox.send(self._untold[0])
                    self._untold.popleft()
            except OSError as error:
                self.fault("report", error)

    # -- arenas ------------------------------------------------------------------------------------------------------

    def _map(self, attach: Attach) -> None:
        with self._lock:
            if attach.token not in self._arenas:
                if attach.tensor != self._shape:
                    raise LayoutError(f"rank {self._rank} has the KV cache {self._shape}, rank 0 {attach.tensor}")
                view = attach_arena(attach.descriptor, self._rank)
                try:
                    cache = PagedCache([[self._tensor]], attach.layouts, self._rank, view)
                except BaseException:
                    view.close()
                    raise
                self._arenas[attach.token] = view, cache
        self._report(Report(self._rank, "attached", attach.token))

    def _cache(self, token: str) -> PagedCache:
        with self._lock:
            if token not in self._arenas:
                raise ArenaError(f"the arena {token[:8]} is not mapped on rank {self._rank}")
            return self._arenas[token][1]

    def _end(self, token: str) -> None:
        with self._lock:
            self._jobs[token] -= 1
            if not self._jobs[token]:
                del self._jobs[token]

    def _sweep(self) -> None:
        """Unmap what is over. Without an arena of now the last stays: it is the same server after a pause."""
        with self._lock:
            if self._now:
                self._let_go({t for t in self._arenas if t not in (self._now, *self._jobs, *self._offered)})

    def _let_go(self, tokens: set[str]) -> None:
        for token in tokens:
            view, cache = self._arenas.pop(token)
            del cache  # its views keep the memory mapped
            view.close()

    # -- the device --------------------------------------------------------------------------------------------------

    def _own_stream(self) -> None:
        """Copies do not queue behind the model's kernels, nor these behind them."""
        if self._tensor.device.type != "cpu":
            import torch

            torch.cuda.set_device(self._tensor.device)
            torch.cuda.set_stream(torch.cuda.Stream())

    def _synchronize(self) -> None:
        if self._tensor is not None and self._tensor.device.type != "cpu":
            import torch

            torch.cuda.current_stream().synchronize()
