"""What a mover asks of a GPU: streams, events, memory, copies and two kernels, by CuPy.

Tests without a GPU have another class with these methods (tests/kvcore/cuda_fake.py).

All that is queued on a stream runs in order, and what stands on two streams in any order that events leave open.
Addresses are plain integers: of the device, or of pinned host memory, which has one address for both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, Literal

Kernel = Literal["kvcore_gather", "kvcore_scatter"]
THREADS = 256
"""Of a thread block: with 16 bytes and four loads each, 16 KiB at once."""
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class CudaDevice:
    """One GPU. Streams and events are opaque; an allocation has its address as `ptr` and is freed with the object.

    CuPy compiles the kernels when they are first used and keeps them in its cache on disk (CUPY_CACHE_DIR). All methods
    raise what CuPy, NVRTC and the driver raise, which have no common root.

    Args:
        index: CUDA's, as in `cuda:1`.
    """

    def __init__(self, index: int) -> None:
        import cupy
        import numpy
        import torch

        self._cupy, self._numpy, self._torch, self._index = cupy, numpy, torch, index
        self._runtime = cupy.cuda.runtime
        attribute = self._runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        self.shared_addresses = bool(self._runtime.deviceGetAttribute(attribute, index))
        """Host memory that is pinned has the same address on the device, so that kernels can reach it."""
        with self.use():
            source = files(__package__).joinpath("blocks.cu").read_text(encoding="utf-8")
            module = cupy.RawModule(code=source, options=("-std=c++17",))
            self._kernels = {name: module.get_function(name) for name in ("kvcore_gather", "kvcore_scatter")}

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make it the calling thread's device."""
        with self._cupy.cuda.Device(self._index):
            yield

    def stream(self) -> Any:
        """A new stream, which the null stream does not wait for, nor it for that."""
        return self._cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        """A new event; as long as it was not recorded, nobody waits for it."""
        return self._cupy.cuda.Event(block=True, disable_timing=True)

    def callers_stream(self) -> Any:
        """The stream on which torch queues the calling thread's work."""
        return SimpleNamespace(ptr=self._torch.cuda.current_stream(self._index).cuda_stream)

    def allocate(self, nbytes: int) -> Any:
        """Memory of the device: not from CuPy's pool, which would keep it from torch."""
        return self._cupy.cuda.Memory(nbytes)

    def allocate_pinned(self, nbytes: int) -> Any:
        """Pinned host memory."""
        return self._cupy.cuda.PinnedMemory(nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory that stands there, which takes a second for some GiB."""
        self._runtime.hostRegister(address, nbytes, _PORTABLE_MAPPED)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._runtime.hostUnregister(address)

    def record(self, event: Any, stream: Any) -> None:
        """The event is over once all is done that the stream holds now."""
        self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from now on waits for the event as last recorded."""
        self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def synchronize(self, event: Any) -> None:
        """Have the calling thread wait for the event, without the GIL."""
        event.synchronize()

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy between device and pinned memory for the copy engine."""
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.ptr)

    def launch(self, kernel: Kernel, groups: int, rows: int, count: int, layers: int, depth: int, stream: Any) -> None:
        """Queue a kernel of blocks.cu with so many thread blocks; `rows` and `layers` are addresses."""
        address, number = self._numpy.uint64, self._numpy.int64
        arguments = address(rows), number(count), address(layers), number(depth)
        with stream:
            self._kernels[kernel]((groups,), (THREADS,), arguments)
