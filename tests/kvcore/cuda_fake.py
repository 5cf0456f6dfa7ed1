"""A GPU that runs what is queued as late, as early, and in any order, as streams and events leave open.

Device memory is host memory. The kernels are those of blocks.cu, compiled for the host. Copies and kernels may touch
only what a GPU could reach: device memory, pinned memory, and the tensors that a test names.
"""

import contextlib
import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cuda_host
import numpy as np
import torch

from kvcore.transfer.cuda.tables import LAYER_BYTES


class FakeMemory:
    """Poisoned: what nobody has written is 0xee."""

    def __init__(self, device: "FakeDevice", nbytes: int) -> None:
        self._memory = np.full(nbytes + 256, 0xEE, np.uint8)
        self.ptr = -(-self._memory.ctypes.data // 256) * 256
        self._device, self._key = device, device.reachable(self.ptr, nbytes)

    def __del__(self) -> None:
        self._device.forget(self._key)


@dataclass(eq=False)
class Stream:
    """`haste`: how likely it runs what it holds before it must."""

    haste: float = 0.0
    queue: deque[Any] = field(default_factory=deque)


@dataclass(eq=False)
class Event:
    last: int = 0
    done: set[int] = field(default_factory=lambda: {0})


class FakeDevice:
    """See `kvcore.transfer.cuda.device.CudaDevice`. `seed` decides how eager each stream is, and who is next.

    `pin_error`: what `pin` raises.
    """

    def __init__(self, seed: int = 0, *, shared_addresses: bool = True, pin_error: Exception | None = None) -> None:
        self.shared_addresses = shared_addresses
        self.random = random.Random(seed)
        self.pin_error = pin_error
        self.pinned: dict[int, int] = {}
        self.allocations = 0
        self.launches: list[int] = []
        self.copies = 0
        self.now = 0.0
        self._regions: dict[int, tuple[int, int]] = {}
        self._keys = itertools.count()
        self._tickets = 0
        self._streams: list[Stream] = []
        self.caller = self.stream()

    # -- what the mover uses -----------------------------------------------------------------------------------------

    def use(self) -> Any:
        return contextlib.nullcontext()

    def stream(self) -> Stream:
        stream = Stream(self.random.choice([0.0, 0.3, 0.9]))
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        return Event()

    def callers_stream(self) -> Stream:
        return self.caller

    def allocate(self, nbytes: int) -> FakeMemory:
        self.allocations += 1
        return FakeMemory(self, nbytes)

    def allocate_pinned(self, nbytes: int) -> FakeMemory:
        return self.allocate(nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        if self.pin_error is not None:
            raise self.pin_error
        assert address not in self.pinned
        self.pinned[address] = self.reachable(address, nbytes)

    def unpin(self, address: int) -> None:
        self.forget(self.pinned.pop(address))

    def record(self, event: Event, stream: Stream) -> None:
        self._tickets += 1
        event.last = self._tickets
        self._push(stream, (event, event.last, True))

    def wait(self, stream: Stream, event: Event) -> None:
        self._push(stream, (event, event.last, False))

    def synchronize(self, event: Event) -> None:
        ticket = event.last
        while ticket not in event.done:
            ready = [s for s in self._streams if self._ready(s)]
            assert ready, "nothing can run: a wait for what is never recorded"
            needed = self._needed(event, ticket)
            lazy = [s for s in ready if s in needed or self.random.random() < s.haste]
            self._step(self.random.choice(lazy or ready))

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._reach(target, nbytes)
        self._reach(source, nbytes)
        self.copies += 1
        self.now += 2e-6 + nbytes / 50e9
        self._push(stream, lambda: ctypes.memmove(target, source, nbytes))

    def launch(self, kernel: str, groups: int, rows: int, count: int, layers: int, depth: int, stream: Stream) -> None:
        assert groups >= 1
        self.launches.append(groups)
        self.now += 1e-5
        part = self._block_bytes(layers) * count * depth
        self.now += part / (min(groups, 24) * 1e9)
        scatter = kernel == "kvcore_scatter"

        def run() -> None:
            self._check(rows, count, layers, depth)
            cuda_host.kernels().launch(scatter, groups, cuda_host.THREADS, rows, count, layers, depth)

        self._push(stream, run)

    # -- what tests use ----------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Virtual seconds: 50 GB/s and 2 us a copy, 1 GB/s for each thread block up to 24 and 10 us a launch."""
        return self.now

    def reachable(self, address: int, nbytes: int) -> int:
        """Let copies and kernels touch these bytes; a key for `forget`."""
        key = next(self._keys)
        self._regions[key] = (address, address + nbytes)
        return key

    def forget(self, key: int) -> None:
        """Undo `reachable`."""
        self._regions.pop(key, None)

    def hold(self, tensor: torch.Tensor) -> None:
        """A tensor is the device's."""
        storage = tensor.untyped_storage()
        self.reachable(storage.data_ptr(), storage.nbytes())

    def compute(self, work: Callable[[], object]) -> None:
        """Queue a kernel of the model, on the caller's stream."""
        self._push(self.caller, work)

    def pending(self) -> int:
        """Operations that have not run."""
        return sum(len(s.queue) for s in self._streams)

    def finish(self) -> None:
        """Run all that is queued."""
        while ready := [s for s in self._streams if self._ready(s)]:
            self._step(self.random.choice(ready))
        assert not self.pending()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _push(self, stream: Stream, item: Any) -> None:
        stream.queue.append(item)
        for other in self.random.sample(self._streams, len(self._streams)):
            while self._ready(other) and self.random.random() < other.haste:
                self._step(other)

    def _ready(self, stream: Stream) -> bool:
        if not stream.queue:
            return False
        item = stream.queue[0]
        return callable(item) or item[2] or item[1] in item[0].done

    def _step(self, stream: Stream) -> None:
        item = stream.queue.popleft()
        if callable(item):
            item()
        elif item[2]:
            item[0].done.add(item[1])

    def _needed(self, event: Event, ticket: int) -> list[Stream]:
        """The streams on which the event depends."""
        found: list[Stream] = []
        asked = [(event, ticket)]
        while asked:
            wanted = asked.pop()
            for stream in self._streams:
                items = [i for i in stream.queue if not callable(i)]
                if stream not in found and any((i[0], i[1]) == wanted and i[2] for i in items):
                    found.append(stream)
                    asked += [(i[0], i[1]) for i in items if not i[2]]
        return found

    def _reach(self, address: int, nbytes: int) -> None:
        assert nbytes > 0
        if not any(begin <= address and address + nbytes <= end for begin, end in list(self._regions.values())):
            raise RuntimeError(f"{nbytes} bytes at {address:#x} are neither the device's nor pinned")

    def _block_bytes(self, layers: int) -> int:
        # Only a size for the clock; the table is uploaded by then.
        return int(np.ctypeslib.as_array((ctypes.c_int64 * 7).from_address(layers))[3])

    def _check(self, rows: int, count: int, layers: int, depth: int) -> None:
        """Every access of a launch, as compute-sanitizer would."""
        row = _table(rows, count, 3)
        table = _table(layers, depth, LAYER_BYTES // 8)
        for address, stride, at, block_bytes, segment, offsets, _ in table.tolist():
            places = _table(offsets, block_bytes // segment, 1)[:, 0]
            for base, index, block in row.tolist():
                self._reach(base + at + index * block_bytes, block_bytes)
                begin = address + block * stride
                self._reach(begin + int(places.min()), int(places.max() - places.min()) + segment)


def _table(address: int, count: int, width: int) -> Any:
    memory = (ctypes.c_int64 * (count * width)).from_address(address)
    return np.frombuffer(memory, np.int64).reshape(count, width)
