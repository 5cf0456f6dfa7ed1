"""The kernels of kernels.cu as host code: the same file, compiled by g++, every thread of a launch run one by one.

`HostDevice` takes the place of a GPU. What is queued on a stream runs when somebody waits for the stream, and on memory
that is not the host's, so that an object that is read before, or not copied, is a failure.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvcore_quant.cuda import THREADS

SOURCE = files("kvcore_quant").joinpath("kernels.cu")

_AROUND = """
#define __global__
#define __device__
static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;
#include "kernels.cu"
#define EVERY_THREAD(call) \\
    gridDim.x = grid, blockDim.x = threads; \\
    for (blockIdx.x = grid; blockIdx.x-- > 0;) \\
        for (threadIdx.x = threads; threadIdx.x-- > 0;) call;
extern "C" void encode(unsigned grid, unsigned threads, const char* payload, char* encoded, const Cell* cells,
                       long long count, long long tiles, int kind, int form, float limit, int* bad) {
    EVERY_THREAD(kvcore_quant_encode(payload, encoded, cells, count, tiles, kind, form, limit, bad))
}
extern "C" void decode(unsigned grid, unsigned threads, char* payload, const char* encoded, const Cell* cells,
                       long long count, long long tiles, int kind, int form) {
    EVERY_THREAD(kvcore_quant_decode(payload, encoded, cells, count, tiles, kind, form))
}
"""
# An access that is not aligned to its size is a fault of the device on a GPU: here it ends the process.
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-fsanitize=alignment"]
_FLAGS += ["-fsanitize-undefined-trap-on-error"]


def compiled(source: str) -> Any:
    """The library of a kernel source."""
    assert shutil.which("g++"), "install g++: the CUDA kernels are tested as host code"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cu").write_text(source)
        Path(folder, "host.cpp").write_text(_AROUND)
        library = Path(folder, "kernels.so")
        subprocess.run(["g++", *_FLAGS, "host.cpp", "-o", library], cwd=folder, check=True)
        return ctypes.CDLL(str(library))


@functools.cache
def kernels() -> Any:
    """The library of the kernels as they are shipped."""
    return compiled(SOURCE.read_text(encoding="utf-8"))


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(b"\x5a" * nbytes, nbytes)
        self.ptr = ctypes.addressof(self._bytes)


class HostDevice:
    """See `kvcore_quant.cuda.CudaDevice`."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or kernels()

    def use(self):
        return nullcontext()

    def stream(self) -> list:
        return []

    def allocate(self, nbytes: int) -> _Memory:
        return _Memory(nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: list) -> None:
        stream.append(lambda: ctypes.memmove(target, source, nbytes))

    def launch(self, kernel: str, groups: int, arguments: tuple, stream: list) -> None:
        kinds = {
            "uint64": ctypes.c_void_p,
            "int64": ctypes.c_longlong,
            "int32": ctypes.c_int,
            "float32": ctypes.c_float,
        }
        values = [kinds[each.dtype.name](each.item()) for each in arguments]
        function = getattr(self._library, kernel.removeprefix("kvcore_quant_"))
        stream.append(lambda: function(ctypes.c_uint(groups), ctypes.c_uint(THREADS), *values))

    def synchronize(self, stream: list) -> None:
        for work in stream:
            work()
        stream.clear()
