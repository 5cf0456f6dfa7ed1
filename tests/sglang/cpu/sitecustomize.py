"""Lets real SGLang run its HiCache on a CPU. For the tests only: Python runs this at its start, in every process that
has this folder in `PYTHONPATH`.

All of SGLang is the unmodified wheel. What it cannot have without a GPU stands here: its compiled kernels (`sgl_kernel`
beside this file), page-locked memory, and two operators of torchvision, whose wheel is built for CUDA.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

POOLS = "sglang.srt.mem_cache.pool_host"


class _Hook(importlib.abc.MetaPathFinder):
    """Runs functions before or after certain modules are imported, once each."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[ModuleType], None]]) -> None:
        self._before = before
        self._after = after

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if (first := self._before.pop(name, None)) is not None:
            first()
        if (then := self._after.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def declare_vision_operators() -> None:
    """torchvision registers kernels for these when it is imported. No test calls them."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def give_kernels(module: ModuleType) -> None:
    """SGLang imports these into its pools only where it finds a GPU."""
    kernels = importlib.import_module("sgl_kernel.kvcacheio")
    for name in kernels.__all__:
        setattr(module, name, getattr(kernels, name))


def leave_memory_unlocked(module: ModuleType) -> None:
    """Only CUDA can lock pages. And SGLang keeps 10 GiB of the machine free, which tests do not have for themselves."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # type: ignore[attr-defined]
    pool = module.HostKVCache
    init = pool.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "pin_memory": False})

    pool.__init__ = __init__


sys.meta_path.insert(
    0,
    _Hook(
        before={"torchvision": declare_vision_operators},
        after={
            f"{POOLS}.base": leave_memory_unlocked,
            f"{POOLS}.mha": give_kernels,
            f"{POOLS}.mla": give_kernels,
        },
    ),
)
