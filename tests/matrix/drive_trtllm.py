"""kvcore's TensorRT-LLM connector over every configuration file, see `drive.py`. TensorRT-LLM does not run here: a
stand-in that keeps to its interface drives the connector, with a model that says other things after one wrong byte."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drive
from trtllm_runtime import Runtime, expected

from kvcore_trtllm.connector import KVCoreScheduler

PROMPTS = [[3 + seed * 1000 + i for i in range(count)] for seed, count in enumerate((300, 290))]
SAID = 4


class Patient(KVCoreScheduler):
    """The machine may be busy."""

    lookup_wait_s = 20.0


@contextmanager
def opened(models: Path) -> Iterator[tuple[Any, dict[str, drive.Serve]]]:
    """The interface has no options: a variable names the file."""

    def serve(file: Path) -> drive.Cell:
        os.environ["KVCORE_CONFIG"] = str(file)
        runtime = Runtime(ranks=2, scheduler=Patient)
        half = runtime.scheduler.half
        until = time.monotonic() + drive.PATIENCE_S

        def go_on(done: Callable[[], Any], step: Callable[[], Any]) -> None:
            while not done():
                assert time.monotonic() < until
                step()

        try:
            go_on(half._ready, lambda: runtime.run([7, 8, 9], 1))  # all ranks have mapped the arena
            requests = [runtime.run(prompt, SAID) for prompt in PROMPTS]
            go_on(lambda: not half._saving and not half._loading, runtime.step)
            assert half.engine.drain(drive.PATIENCE_S) == 0
            outputs = [request.tokens[len(request.prompt) :] for request in requests]
            reused = sum(request.matched for request in requests)
            return drive.cell(outputs, sum(map(len, PROMPTS)), reused, half.engine.stats(), runtime.faults())
        finally:
            runtime.close()

    yield [expected(prompt, SAID, 2) for prompt in PROMPTS], {"trtllm": serve}


if __name__ == "__main__":
    drive.main("kvcore-trtllm", opened)
