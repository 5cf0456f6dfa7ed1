"""The main job, end to end: a long prompt is computed once and never again.

Real vLLM on a CPU answers questions about a long document three times: without kvcore; with kvcore, cold and then from
host memory; and, after that engine process has ended, in a new one, from the store: a disk, or the server that
`--store` names. The answers must be the same token for token. Prints a table and writes it as a picture (`report.svg`)
and a page (`report.html`).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from report import Row, html, svg, table
from runs import HERE, counter, forget_page_cache, kvcore_transfer, own_seconds, questions, run_engine, say
from stores import STORES

QUESTIONS = (
    "In one sentence, what is this handbook about?",
    "Which licence is quoted in the handbook?",
    "What is a lease, according to the handbook?",
)
PROMPT_TOKENS = 6000
MAX_TOKENS = 24


def main() -> int:
    arguments = argparse.ArgumentParser(description="A long prompt is computed once and never again.")
    arguments.add_argument("--model", required=True, type=Path, help="directory of the model")
    arguments.add_argument("--store", choices=STORES, default="disk", help="where the KV is kept")
    arguments.add_argument("--out", default=Path("build/demo"), type=Path, help="where the report and the cache go")
    options = arguments.parse_args()
    out: Path = options.out.resolve()
    cache = out / options.store
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    with STORES[options.store](cache) as storage:
        return run(options.model, out, options.store, storage, cache)


def run(model: Path, out: Path, store: str, storage: dict[str, Any], cache: Path) -> int:
    """Ask, compare, report; the exit status."""
    prompts, warm_up = questions(model, PROMPT_TOKENS, QUESTIONS)
    job = {"model": str(model.resolve()), "dtype": "float32", "max_tokens": MAX_TOKENS, "warm_up": warm_up}
    transfer = kvcore_transfer({"config": str(HERE / "kvcore.yaml"), "l2[0].storage": storage})
    steps = [{"prompt": p, "reset": True} for p in prompts]

    say("vLLM alone: every question is computed (1 of 3)")
    alone = run_engine({**job, "steps": steps, "transfer": None}, out)
    say("vLLM with kvcore: the first question is computed, then all are asked and reuse it from host memory (2 of 3)")
    one = run_engine({**job, "steps": [steps[0], *steps], "transfer": transfer}, out)
    forget_page_cache(cache)
    say(f"a new engine process: the first question comes from {store} (3 of 3)")
    two = run_engine({**job, "steps": steps, "transfer": transfer}, out)

    rows = [
        *(row("vLLM alone", i, a, a, prompts[i]) for i, a in enumerate(alone)),
        row("kvcore, cold", 0, one[0], alone[0], prompts[0]),
        *(row("kvcore, from host memory", i, a, alone[i], prompts[i]) for i, a in enumerate(one[1:])),
        row(f"kvcore, new process, from {store}", 0, two[0], alone[0], prompts[0]),
        *(row("kvcore, new process, from memory", i, two[i], alone[i], prompts[i]) for i in range(1, len(two))),
    ]
    notes = describe(model.name, prompts[0], store, one)
    print()
    print(table(rows))
    print("\n".join(notes))
    (out / "report.svg").write_text(svg(rows))
    (out / "report.html").write_text(html(rows, notes, QUESTIONS, [a["text"] for a in alone]))
    print(f"\nPicture: {out / 'report.svg'}\nPage:    {out / 'report.html'}")

    faults = [f"{r.phase}, question {r.question}: the answer differs from vLLM's own" for r in rows if not r.identical]
    faults += [
        f"{r.phase}, question {r.question}: only {r.reused} of {r.prompt} tokens were reused"
        for r in rows
        if "from" in r.phase and r.reused < r.prompt * 9 // 10
    ]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("Every answer is the same, token for token.")
    return int(bool(faults))


def describe(model: str, prompt: list[int], store: str, one: list[dict[str, Any]]) -> list[str]:
    """What the table does not say."""
    raw = sum(counter(a, "kvcore_serde_bytes", "side=in") for a in one)
    encoded = sum(counter(a, "kvcore_serde_bytes", "side=out") for a in one)
    return [
        f"Prompt: {len(prompt)} tokens; model: {model}, float32; {os.cpu_count()} cores, the engine computes on one.",
        f"In {store}: {encoded / 1e6:.0f} MB, compressed {raw / max(encoded, 1.0):.2f} to 1 without loss (float32; "
        "bf16 gains more).",
        f"Cold, kvcore took {100 * own_seconds(one[0]) / one[0]['ttft_s']:.2f} % of the time to first token.",
    ]


def row(phase: str, question: int, answer: dict[str, Any], reference: dict[str, Any], prompt: list[int]) -> Row:
    """One line of the report."""
    moved, seconds = counter(answer, "kvcore_load_bytes"), counter(answer, "kvcore_load_seconds")
    return Row(
        phase=phase,
        question=question + 1,
        ttft_s=answer["ttft_s"],
        speedup=reference["ttft_s"] / answer["ttft_s"],
        reused=answer["cached_tokens"] or 0,
        prompt=len(prompt),
        nbytes=moved,
        rate=moved / seconds / 1e9 if seconds else None,
        identical=answer["token_ids"] == reference["token_ids"],
    )


if __name__ == "__main__":
    sys.exit(main())
