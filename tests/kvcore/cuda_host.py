"""The kernels of blocks.cu as host code: the same file, compiled by g++, every thread of a launch run one by one."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

SOURCE = files("kvcore.transfer.cuda").joinpath("blocks.cu")
THREADS = 8
"""Few, so that small blocks take several turns of a loop."""

_AROUND = """
#define __global__
#define __device__
#define __restrict__ __restrict
static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;
#include "blocks.cu"
extern "C" void launch(
    int scatter, unsigned groups, unsigned threads,
    const Row* rows, long long count, const Layer* layers, long long depth
) {
    gridDim.x = groups, blockDim.x = threads;
    for (blockIdx.x = groups; blockIdx.x-- > 0;)
        for (threadIdx.x = threads; threadIdx.x-- > 0;)
            (scatter ? kvcore_scatter : kvcore_gather)(rows, count, layers, depth);
}
"""
# An access that is not aligned to its size is a fault of the device on a GPU: here it ends the process.
_FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-fsanitize=alignment"]
_FLAGS += ["-fsanitize-undefined-trap-on-error"]


def compiled(source: str) -> Any:
    """The library of a kernel source: `launch(scatter, groups, threads, rows, count, layers, depth)`."""
    assert shutil.which("g++"), "install g++: the CUDA kernels are tested as host code"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "blocks.cu").write_text(source)
        Path(folder, "host.cpp").write_text(_AROUND)
        library = Path(folder, "blocks.so")
        subprocess.run(["g++", *_FLAGS, "host.cpp", "-o", library], cwd=folder, check=True)
        found = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    found.launch.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint, pointer, number, pointer, number)
    found.launch.restype = None
    return found


@functools.cache
def kernels() -> Any:
    """The library of the kernels as they are shipped."""
    return compiled(SOURCE.read_text(encoding="utf-8"))
