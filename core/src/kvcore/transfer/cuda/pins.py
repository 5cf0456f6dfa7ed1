"""Arenas that this process has pinned, so that a GPU reaches them by itself."""

import ctypes
import logging
import threading
import weakref
from typing import Any

from kvcore.api import format_size
from kvcore.transfer.cuda.device import CudaDevice

logger = logging.getLogger("kvcore.transfer")
_lock = threading.Lock()
_arenas: "weakref.WeakValueDictionary[tuple[int, int], Pinned]" = weakref.WeakValueDictionary()


def pinned(device: CudaDevice, memory: memoryview) -> "Pinned":
    """The arena that is mapped there, pinned once in this process for as long as somebody has `memory`, or the result:
    whoever makes movers for each call finds it pinned."""
    key = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    with _lock:
        found = _arenas.get(key)
        if found is None:
            found = _arenas[key] = Pinned(device, memory, key[0])
            weakref.finalize(memory, id, found).atexit = False  # which keeps it until then
        return found


class Pinned:
    """Host memory that is pinned by a thread, because that takes seconds for large arenas, and unpinned before it is
    unmapped. Until it is `ready`, and for ever where it cannot be pinned, copies go through small pinned buffers."""

    def __init__(self, device: CudaDevice, memory: memoryview, address: int) -> None:
        self.address = address
        self._done = threading.Event()
        arguments = device, self._done, address, memory[:]  # which stays mapped until it is unpinned
        self._thread = threading.Thread(target=_pin, args=arguments, name="kvcore-pin", daemon=True)
        self._thread.start()
        weakref.finalize(self, _let_go, self._thread, *arguments).atexit = False

    @property
    def ready(self) -> bool:
        """Is it pinned?"""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until that is decided; `ready`."""
        self._thread.join(timeout_s)
        return self.ready


def _pin(device: CudaDevice, done: threading.Event, address: int, memory: memoryview) -> None:
    try:
        with device.use():
            device.pin(address, len(memory))
        done.set()
    except Exception as error:
        logger.warning(
            "the arena of %s cannot be pinned, so KV crosses through a small pinned buffer, which is slower: %s. "
            "Make l1.size smaller, or give the container more memory",
            format_size(len(memory)),
            error,
        )


def _let_go(*arguments: Any) -> None:
    """Nobody waits for it: whoever drops the last mover of an arena may be in an engine's step."""
    threading.Thread(target=_unpin, args=arguments, name="kvcore-unpin", daemon=True).start()


def _unpin(
    thread: threading.Thread, device: CudaDevice, done: threading.Event, address: int, _memory: memoryview
) -> None:
    thread.join()
    if done.is_set():
        with device.use():
            device.unpin(address)
