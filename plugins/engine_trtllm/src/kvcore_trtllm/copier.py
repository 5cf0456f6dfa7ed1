"""The thread that copies beside the engine's steps."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from kvcore_trtllm.metadata import Load, Save

AGAIN_S = 1.0
"""A load that has failed is tried again after so long, for as long as its request is there: the engine counts on it."""


class Copier:
    """Runs loads and saves one after another on one thread.

    Args:
        load: copies into the KV cache; returns whether all of it is there. save: copies out of it. Neither raises.
        prepare: called on the thread before its first copy. sync: returns when the device has done what it was told.
        saved: told of each save that has ended, and loaded of each load.
    """

    def __init__(
        self,
        load: Callable[[Load], bool],
        save: Callable[[Save], bool],
        prepare: Callable[[], None],
        sync: Callable[[], None],
        loaded: Callable[[Load, bool], None],
        saved: Callable[[Save, bool], None],
    ) -> None:
        self._load, self._save, self._prepare, self._sync = load, save, prepare, sync
        self._loaded, self._saved = loaded, saved
        self._queue: queue.SimpleQueue[tuple[Load | Save, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}
        """Request -> its jobs that have not ended."""
        self._done: set[int] = set()
        """Requests whose load has ended well."""
        self._gone: set[int] = set()
        """Requests that have ended: their failed loads are not tried again."""
        self._thread: threading.Thread | None = None

    def submit(self, job: "Load | Save", event: Any = None) -> None:
        """Queue a job. `event`: has `synchronize()`, waited for before the copy; or None."""
        with self._lock:
            self._running[job.request] = self._running.get(job.request, 0) + 1
            self._done.discard(job.request)  # before a save: the engine has not waited for the load
            if isinstance(job, Load):
                self._gone.discard(job.request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcore-copy", daemon=True)
                self._thread.start()
        self._queue.put((job, event))

    def loaded(self, request: int) -> bool:
        """Has its load ended well?"""
        with self._lock:
            return request in self._done

    def busy(self, request: int) -> bool:
        """Does any job touch the blocks of this request?"""
        with self._lock:
            return request in self._running

    def taken(self, request: int) -> None:
        """The engine has been told that it is loaded."""
        with self._lock:
            self._done.discard(request)

    def forget(self, request: int) -> None:
        """The request has ended."""
        with self._lock:
            self._done.discard(request)
            if request in self._running:
                self._gone.add(request)

    def close(self) -> None:
        """End the thread after what it is at. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._gone.update(self._running)
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        ready = False
        late: list[tuple[float, Load]] = []
        while True:
            wait = late[0][0] - time.monotonic() if late else None
            try:
                item = self._queue.get(timeout=wait) if wait is None or wait > 0 else (late.pop(0)[1], None)
            except queue.Empty:
                continue
            if item is None:
                for _, load in late:
                    self._end(load, False)
                return
            job, event = item
            ok = False
            try:
                if not ready:
                    self._prepare()
                    ready = True
                if event is not None:
                    event.synchronize()
                ok = self._load(job) if isinstance(job, Load) else self._save(job)
                self._sync()
            except Exception:
                ok = False
            if isinstance(job, Load) and not ok and not self._over(job.request):
                late.append((time.monotonic() + AGAIN_S, job))
            else:
                self._end(job, ok)

    def _over(self, request: int) -> bool:
        with self._lock:
            return request in self._gone

    def _end(self, job: "Load | Save", ok: bool) -> None:
        with self._lock:
            self._running[job.request] -= 1
            if not self._running[job.request]:
                del self._running[job.request]
                self._gone.discard(job.request)
            if isinstance(job, Load) and ok:
                self._done.add(job.request)
        if isinstance(job, Load):
            self._loaded(job, ok)
        else:
            self._saved(job, ok)
