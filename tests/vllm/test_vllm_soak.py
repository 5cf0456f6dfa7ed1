"""kvcore under real vLLM for as long as wanted: conversations at once, aborts, files that get damaged. Each answer is
the one of vLLM without a cache, and when nobody asks, nothing is left.

    KVCORE_TEST_SOAK_S=600 pytest tests/vllm/test_vllm_soak.py -s
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SOAK_S = float(os.environ.get("KVCORE_TEST_SOAK_S", "6"))
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300 + 3 * SOAK_S)]
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""oneDNN compiles each of the model's products anew for each number of tokens, and keeps so many: as many as it likes
make vLLM on a CPU grow by hundreds of MiB, with and without kvcore."""
THREADS = Counter({"kvcore-io": 1, "kvcore-inspect": 1, "kvcore-copy": 1, "kvcore-disk": 4, "kvcore-codec": 4})
"""At most: each starts when it is needed first."""
NO_LEAKS = {"leases": 0, "staging": 0, "quarantined": 0, "plans": 0, "requests": 0}


def test_soak_answers_are_those_without_a_cache_and_nothing_grows(run_child: Any, tmp_path: Path) -> None:
    name = f"soak:{json.dumps({'folder': str(tmp_path / 'tier'), 'seconds': SOAK_S})}"
    results = run_child(name, timeout_s=int(280 + 3 * SOAK_S), **FEW_KERNELS)
    found = results[name]
    lines = [line for line in results.log.read_text().splitlines() if " WARNING " in line or " ERROR " in line]
    rests = found["rests"]
    print(f"{found['seconds']:.0f} s", found["seen"], f"{found['preemptions']:.0f} preemptions")
    print("taken at rest:", *(rest["taken"][:3] for rest in rests), f"{100 * found['idle']:.1f} % of a core")
    print(f"lookups p50 {1000 * found['p50']:.2f} ms, p99 {1000 * found['p99']:.2f} ms")
    print(f"{len(lines)} log lines", *lines[:12], sep="\n  ")
    print({k: v for k, v in found["stats"].items() if "seconds" not in k and "created" not in k})

    seen = found["seen"]
    assert found["wrong"] == []
    assert seen["right"] > SOAK_S
    assert seen.get("near", 0) <= seen["right"] / 50
    assert seen["cached"] > seen["prompt"] / 4
    assert found["faults"] == {}
    assert [rest["leaks"] for rest in rests] == [NO_LEAKS] * len(rests)
    early, last = rests[len(rests) // 2], rests[-1]
    assert last["taken"][0] - early["taken"][0] < 8 << 10, rests  # KiB
    assert last["taken"][1] - early["taken"][1] <= 4, rests
    assert Counter(last["threads"]) <= THREADS, last["threads"]
    assert found["idle"] < 0.1
    assert len(lines) < 60 + 2 * SOAK_S
