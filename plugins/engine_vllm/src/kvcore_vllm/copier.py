"""The thread that copies beside the engine's own."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from kvcore_vllm.metadata import Load, Save

Kind = Literal["load", "save"]


class Layers(NamedTuple):
    """Some layers of one KV cache group."""

    group: int
    layers: range


END = Layers(0, range(0))
"""What ends a job whose parts were all submitted before."""


class Copier:
    """Runs loads and saves one after another on one thread, and collects what has ended. A job comes whole, or in parts
    of some layers each; it has failed as far as any of them has.

    Args:
        load: copies all layers or some into the paged KV; returns the block ids that failed.
        save: copies them out of it; returns whether it succeeded. Neither raises.
        prepare: called on the thread before its first copy.
        sync: called on the thread after each copy; returns when the device has done it.
    """

    def __init__(
        self,
        load: Callable[[Load, Layers | None], set[int]],
        save: Callable[[Save, Layers | None], bool],
        prepare: Callable[[], None],
        sync: Callable[[], None],
    ) -> None:
        self._load = load
        self._save = save
        self._prepare = prepare
        self._sync = sync
        self._queue: queue.SimpleQueue[tuple[Kind, Any, Any, Layers | None, bool] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._ended = 0
        self._running: dict[tuple[Kind, int], str] = {}
        self._bad: dict[int, set[int]] = {}
        self._broken: set[int] = set()
        self._loaded: list[tuple[Load, set[int]]] = []
        self._saved: list[tuple[Save, bool]] = []
        self._thread: threading.Thread | None = None

    def submit(
        self, kind: Kind, job: "Load | Save", event: Any, layers: Layers | None = None, last: bool = True
    ) -> int:
        """Queue a job, or a part of it, of which one must be the last. What it returns goes to `reach`.

        `event`: has `synchronize()`, waited for before the copy; or None. `layers`: which, None is all.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvcore-copy", daemon=True)
            thread.start()  # where there is no room for one, nothing is queued, and the next call tries again
            self._thread = thread
        with self._changed:
            self._running[kind, job.id] = job.req_id
            self._submitted += 1
            self._queue.put((kind, job, event, layers, last))
            return self._submitted

    def reach(self, submitted: int) -> None:
        """Wait until all has ended up to what `submit` returned this for."""
        with self._changed:
            while self._ended < submitted:
                self._changed.wait()

    def take(self, wait_s: float = 0.0) -> tuple[list[tuple[Load, set[int]]], list[tuple[Save, bool]]]:
        """What has ended since the last call. Waits at most `wait_s` when something runs and nothing has ended."""
        with self._changed:
            if wait_s and self._running and not (self._loaded or self._saved):
                self._changed.wait(wait_s)
            done = self._loaded, self._saved
            self._loaded, self._saved = [], []
        return done

    def drop(self, job: Save) -> None:
        """End a save of which parts were submitted, or could not be; it has failed."""
        with self._changed:
            if self._thread is None:
                self._saved.append((job, False))
                return
            self._broken.add(job.id)
        self.submit("save", job, None, END)

    def saving(self, req_id: str) -> bool:
        """Is a save of this request queued or running?"""
        with self._changed:
            return any(kind == "save" and owner == req_id for (kind, _), owner in self._running.items())

    def flush(self, save_ids: Sequence[int], timeout_s: float = 10.0) -> None:
        """Wait until these saves have ended. Raises `TimeoutError`; what ends later then counts as failed."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while late := [i for i in save_ids if ("save", i) in self._running]:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    self._broken.update(late)
                    raise TimeoutError(f"saves did not end within {timeout_s:g} s")

    def close(self) -> None:
        """End the thread after what is queued. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        ready = False
        while (item := self._queue.get()) is not None:
            kind, job, event, layers, last = item
            try:
                if not ready:
                    self._prepare()
                    ready = True
                if event is not None:
                    event.synchronize()
                if kind == "load":
                    self._bad.setdefault(job.id, set()).update(self._load(job, layers))
                elif layers is not END and job.id not in self._broken and not self._save(job, layers):
                    self._broken.add(job.id)
                self._sync()
            except Exception:
                if kind == "load":
                    self._bad.setdefault(job.id, set()).update(job.blocks)  # with those of its earlier parts
                else:
                    self._broken.add(job.id)
            with self._changed:
                self._ended += 1
                if last:
                    del self._running[kind, job.id]
                    if kind == "load":
                        self._loaded.append((job, self._bad.pop(job.id)))
                    else:
                        self._saved.append((job, job.id not in self._broken))
                        self._broken.discard(job.id)
                self._changed.notify_all()
