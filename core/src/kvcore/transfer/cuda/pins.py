"""Arenas that this process has pinned, so that a GPU reaches them by itself."""

import ctypes
import logging
import threading
import weakref

from kvcore.api import format_size
from kvcore.transfer.cuda.device import Device

logger = logging.getLogger("kvcore.transfer")
_lock = threading.Lock()
_arenas: "weakref.WeakValueDictionary[tuple[int, int], Pinned]" = weakref.WeakValueDictionary()


def pinned(device: Device, memory: memoryview) -> "Pinned":
    """The arena that is mapped there, pinned once in this process for as long as somebody has the result."""
    key = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    with _lock:
        found = _arenas.get(key)
        if found is None:
            found = _arenas[key] = Pinned(device, memory, key[0])
        return found


class Pinned:
    """Host memory that is pinned by a thread, because that takes seconds for large arenas, and unpinned before it is
    unmapped. Until it is `ready`, and for ever where it cannot be pinned, copies go through small pinned buffers."""

    def __init__(self, device: Device, memory: memoryview, address: int) -> None:
        self.address = address
        self._state = _State()
        thread = threading.Thread(
            target=_pin, args=(device, self._state, address, len(memory)), name="kvcore-pin", daemon=True
        )
        thread.start()
        self._thread = thread
        # The memory stands in the arguments: it stays mapped until it is unpinned.
        weakref.finalize(self, _unpin, device, self._state, address, thread, memory[:]).atexit = False

    @property
    def ready(self) -> bool:
        """Is it pinned?"""
        return self._state.pinned

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until that is decided; `ready`."""
        self._thread.join(timeout_s)
        return self.ready


class _State:
    pinned = False


def _pin(device: Device, state: _State, address: int, nbytes: int) -> None:
    try:
        with device.use():
            device.pin(address, nbytes)
        state.pinned = True
    except Exception as error:
        logger.warning(
            "the arena of %s cannot be pinned, so KV crosses through a small pinned buffer, which is slower: %s. "
            "Make l1.size smaller, or give the container more memory",
            format_size(nbytes),
            error,
        )


def _unpin(device: Device, state: _State, address: int, thread: threading.Thread, _memory: memoryview) -> None:
    thread.join()
    if state.pinned:
        with device.use():
            device.unpin(address)
