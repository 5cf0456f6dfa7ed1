"""KV on NVIDIA GPUs: two kernels that copy all blocks and layers of a call at once, and what runs around them.

No file here is bound to a version of torch or CUDA: the kernels are compiled on the machine, by NVRTC through CuPy
(`pip install 'kvcore[cuda]'`). Without CuPy, and on every other device, torch operations copy.

Never run on a GPU by this project so far; docs/gpu.md says what has been checked, and how.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.transfer.cuda.support import obstacle

if TYPE_CHECKING:
    import torch

    from kvcore.transfer.cuda.lanes import Gpu
    from kvcore.transfer.cuda.mover import CudaMover

logger = logging.getLogger("kvcore.transfer")
_lock = threading.Lock()
_gpus: "dict[int, Gpu | None]" = {}
_said: set[str] = set()


def cuda_movers(tensors: "Sequence[torch.Tensor]", blocks: int, memory: memoryview) -> "list[CudaMover] | None":
    """The mover of a group's layers; None, said once in the log, where torch has to copy."""
    devices = {t.device for t in tensors}
    device = tensors[0].device
    if device.type == "cpu":
        return None
    why = obstacle(device.type) if len(devices) == 1 else f"a KV group lies on several devices: {devices}"
    if why is None:
        gpu = gpu_of(device.index or 0)
        if gpu is None:
            return None  # said
        from kvcore.transfer.cuda.mover import cuda_mover

        mover = cuda_mover(tensors, blocks, memory, gpu)
        if mover is not None:
            return [mover]
        why = "a block of one layer is larger than a staging buffer"
    _say(f"KV on {device.type} is copied by torch operations, which is slower: {why}")
    return None


def prepare(tensors: "Iterable[torch.Tensor]") -> None:
    """Compile, allocate and measure for the GPUs that these are on, so that no step has to. Never raises: a GPU that
    cannot be used is said in the log."""
    for device in {t.device for t in tensors}:
        if obstacle(device.type) is None:
            gpu_of(device.index or 0)


def gpu_of(index: int) -> "Gpu | None":
    """This process's streams, buffers and kernels on a GPU, made at the first call; None, said once, if that fails."""
    with _lock:
        if index not in _gpus:
            try:
                from kvcore.transfer.cuda.device import CudaDevice
                from kvcore.transfer.cuda.lanes import Gpu

                _gpus[index] = Gpu(CudaDevice(index))
            except Exception as error:  # CuPy's, NVRTC's and the driver's have no common root
                _gpus[index] = None
                _say(f"KV on cuda:{index} is copied by torch operations, which is slower: {error}")
        return _gpus[index]


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)
