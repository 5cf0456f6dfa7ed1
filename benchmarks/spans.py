"""When what began and ended in the processes of a real vLLM: `ttft_timeline.py` has its engine run with these.

vLLM imports this module as `kv_connector_module_path`, in the scheduler's process and in each worker. Spans are lines
of JSON in the folder that `TTFT_SPANS` names, a file for each process: thread, name, begin and end in seconds of the
monotonic clock, which all processes of a machine share.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvcore.engine import CacheEngine
from kvcore.l2.codec import Codec
from kvcore.transfer import PagedCache
from kvcore_disk.storage import DiskStorage
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.scheduler import SchedulerHalf


class TracedConnector(KVCoreConnector):
    """kvcore's connector; that this module is imported is all that differs."""


class _File:
    """Lines of this process, written when they are."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def add(self, name: str, begin: float, end: float) -> None:
        pid = os.getpid()
        if pid not in self._fds:
            path = Path(os.environ["TTFT_SPANS"]) / f"{pid}.jsonl"
            self._fds[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        line = json.dumps([threading.current_thread().name, name, begin, end])
        os.write(self._fds[pid], line.encode() + b"\n")


FILE = _File()


def trace(owner: Any, method: str, name: str, wanted: Callable[..., bool] = lambda *args: True) -> None:
    """Have each call of `owner.method` for which `wanted(*args)` is true written down as `name`."""
    inner = getattr(owner, method)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        if not wanted(*args):
            return inner(*args, **kwargs)
        begin = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            FILE.add(name, begin, time.monotonic())

    setattr(owner, method, outer)


trace(EngineCore, "add_request", "arrived")
trace(Scheduler, "schedule", "schedule")
trace(Scheduler, "update_from_output", "result")
trace(SchedulerHalf, "matched_tokens", "lookup")
trace(SchedulerHalf, "allocated", "plan")
trace(CacheEngine, "lookup", "leases")
trace(DiskStorage, "load", "read")
trace(Codec, "decode", "check and decode")
trace(PagedCache, "load", "copy in", lambda cache, copies, *rest: bool(copies))
trace(GPUModelRunner, "execute_model", "step", lambda runner, output, *rest: output.total_num_scheduled_tokens > 0)
trace(
    GPUModelRunner, "execute_model", "empty step", lambda runner, output, *rest: not output.total_num_scheduled_tokens
)
trace(GPUModelRunner, "_model_forward", "forward")
trace(CPUModelRunner, "sample_tokens", "sample")
