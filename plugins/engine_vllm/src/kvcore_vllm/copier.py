"""The thread that copies beside the engine's steps."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvcore_vllm.metadata import Load, Save

Kind = Literal["load", "save"]


class Copier:
    """Runs loads and saves one after another on one thread, and collects what has ended.

    Args:
        load: copies into the paged KV; returns the block ids that failed.
        save: copies out of it; returns whether it succeeded. Neither raises.
        prepare: called on the thread before its first copy.
        sync: called on the thread after each copy; returns when the device has done it.
    """

    def __init__(
        self,
        load: Callable[[Load], set[int]],
        save: Callable[[Save], bool],
        prepare: Callable[[], None],
        sync: Callable[[], None],
    ) -> None:
        self._load = load
        self._save = save
        self._prepare = prepare
        self._sync = sync
        self._queue: queue.SimpleQueue[tuple[Kind, Any, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._running: dict[tuple[Kind, int], str] = {}
        self._loaded: list[tuple[Load, set[int]]] = []
        self._saved: list[tuple[Save, bool]] = []
        self._late: set[int] = set()
        self._thread: threading.Thread | None = None

    def submit(self, kind: Kind, job: "Load | Save", event: Any) -> None:
        """Queue a job. `event`: has `synchronize()`, waited for before the copy; or None."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvcore-copy", daemon=True)
            self._thread.start()
        with self._changed:
            self._running[kind, job.id] = job.req_id
        self._queue.put((kind, job, event))

    def take(self, wait_s: float = 0.0) -> tuple[list[tuple[Load, set[int]]], list[tuple[Save, bool]]]:
        """What has ended since the last call. Waits at most `wait_s` when something runs and nothing has ended."""
        with self._changed:
            if wait_s and self._running and not (self._loaded or self._saved):
                self._changed.wait(wait_s)
            done = self._loaded, self._saved
            self._loaded, self._saved = [], []
        return done

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
                    self._late.update(late)
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
            kind, job, event = item
            try:
                if not ready:
                    self._prepare()
                    ready = True
                if event is not None:
                    event.synchronize()
                result: Any = self._load(job) if kind == "load" else self._save(job)
                self._sync()
            except Exception:
                result = set(job.blocks) if kind == "load" else False
            with self._changed:
                del self._running[kind, job.id]
                if kind == "load":
                    self._loaded.append((job, result))
                else:
                    self._saved.append((job, result and job.id not in self._late))
                self._changed.notify_all()
