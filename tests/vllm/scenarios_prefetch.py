"""A scenario with requests that wait for their turn: what they need is brought into L1 meanwhile. Traces tell."""

import time
from pathlib import Path
from typing import Any

from engines import engine
from opentelemetry.trace import get_tracer_provider
from scenarios_basic import LONG, PROMPTS
from scenarios_disk import _disk

from vllm import SamplingParams, TokensPrompt


def queued(models: Path, folder: str, collector: str, headers: dict[str, str]) -> dict[str, Any]:
    """A new engine that runs one request at a time, over what another one has left on the disk. The last one has the
    `headers` of a trace."""
    options = {**_disk(folder), "kvcore.hooks": ["prefetch", {"plugin": "otel", "endpoint": collector}]}
    with engine(str(models / "tiny"), options, max_num_seqs=1, otlp_traces_endpoint=f"{collector}/v1/traces") as e:
        e.one([5, 6, 7], 4)  # what is compiled or allocated at the first step is not waited for
        texts, cached = e.run([LONG, *PROMPTS], 64)
        e.settle()
        give_up = time.monotonic() + 60
        while (brought := e.half.engine.prefetcher.brought("queued")).used == 0 and time.monotonic() < give_up:
            time.sleep(0.1)
        e.forget()
        vllm, params = e.llm.llm_engine, SamplingParams(temperature=0, max_tokens=2)
        traced = vllm.add_request("traced", TokensPrompt(prompt_token_ids=LONG), params, trace_headers=headers)
        while vllm.has_unfinished_requests():
            vllm.step()
        get_tracer_provider().force_flush()  # vLLM's own spans
        return {
            "traced": traced,
            "texts": [(tokens[:16], 0.0) for tokens, _ in texts],
            "cached": cached,
            "brought": list(brought),
            "stats": e.half.engine.stats(),
            "leaks": e.leaks(),
            "faults": e.faults(),
        }
