"""The loop of every peer script: a row's name in, one sample out. The protocol is that of `kvcore_bench.speed.peer`."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

for name, value in (
    ("LMCACHE_LOG_LEVEL", "ERROR"),
    ("LMCACHE_TRACK_USAGE", "false"),
    ("DO_NOT_TRACK", "1"),
    ("LMCACHE_DISABLE_BANNER", "1"),
):
    os.environ.setdefault(name, value)

SETTING: dict[str, Any] = json.loads(sys.stdin.readline())
"""What `kvcore bench` tells the script: sizes, and where to write."""

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the peer prints must not come between answers


def serve(rows: dict[str, Callable[[], float]]) -> None:
    """Answer until the other side hangs up, then leave without waiting for the peer's threads."""
    _say({"peer": f"lmcache {version('lmcache')}", "rows": list(rows)})
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"value": rows[line.strip()]()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answer)
    os._exit(0)


def us_each(
    calls: Callable[[], object],
    each: int,
    *,
    repeats: int = 20,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Callable[[], float]:
    """Microseconds of `calls()` divided by `each`: the best of `repeats` runs. `before` and `after` are not timed."""

    def sample() -> float:
        best = 1 << 62
        gc.collect()
        for _ in range(repeats):
            before()
            begun = time.perf_counter_ns()
            calls()
            best = min(best, time.perf_counter_ns() - begun)
            after()
        return best / each / 1000

    return sample


def _say(answer: dict[str, Any]) -> None:
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()
