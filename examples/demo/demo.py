"""The main job, end to end: a long prompt is computed once and never again.

Real vLLM on a CPU answers questions about a long document three times: without kvcore; with kvcore, cold and then from
host memory; and, after that engine process has ended, in a new one, from disk. The answers must be the same token for
token. Prints a table and writes it as a picture (`report.svg`) and a page (`report.html`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import Row, html, svg, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
QUESTIONS = (
    "In one sentence, what is this handbook about?",
    "Which licence is quoted in the handbook?",
    "What is a lease, according to the handbook?",
)
PROMPT_TOKENS = 6000
MAX_TOKENS = 24


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    arguments.add_argument("--model", required=True, type=Path, help="directory of the model")
    arguments.add_argument("--out", default=Path("build/demo"), type=Path, help="where the report and the cache go")
    options = arguments.parse_args()
    out: Path = options.out.resolve()
    cache = out / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    prompts, warm_up = make_prompts(options.model)
    job = {"model": str(options.model.resolve()), "dtype": "float32", "max_tokens": MAX_TOKENS, "warm_up": warm_up}
    with_kvcore = {"config": str(HERE / "kvcore.yaml"), "l2.0.storage.path": str(cache)}
    first = prompts[0]

    say("vLLM alone: every question is computed (1 of 3)")
    alone = run({**job, "prompts": prompts, "flags": None}, out)
    say("vLLM with kvcore: the first question is computed, the others reuse it from host memory (2 of 3)")
    one = run({**job, "prompts": [first, *prompts], "flags": with_kvcore}, out)
    stored = forget_page_cache(cache)
    say(f"a new engine process: the first question comes from disk, {stored / 1e6:.0f} MB (3 of 3)")
    two = run({**job, "prompts": prompts, "flags": with_kvcore}, out)

    rows = [
        *(row("vLLM alone", i, a, alone[i], prompts[i]) for i, a in enumerate(alone)),
        row("kvcore, cold", 0, one[0], alone[0], first),
        *(row("kvcore, from host memory", i, a, alone[i], prompts[i]) for i, a in enumerate(one[1:])),
        row("kvcore, new process, from disk", 0, two[0], alone[0], first),
        *(row("kvcore, new process, from memory", i, two[i], alone[i], prompts[i]) for i in range(1, len(two))),
    ]
    ratio = counter(one[0], "kvcore_serde_bytes", "side=in") / max(1.0, counter(one[0], "kvcore_serde_bytes", "side=out"))
    notes = [
        f"Prompt: {len(first)} tokens; model: {options.model.name}, float32; {os.cpu_count()} cores, the engine on one.",
        f"On disk: {stored / 1e6:.0f} MB, lossless compression {ratio:.2f} to 1 (float32; bf16 gains more).",
        f"Cold, kvcore's own calls took {100 * own_seconds(one[0]) / one[0]['ttft_s']:.2f} % of the time to first token.",
    ]
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
        if "from" in r.phase and r.reused < r.prompt // 2
    ]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("Every answer is the same, token for token.")
    return int(bool(faults))


def make_prompts(model: Path) -> tuple[list[list[int]], list[int]]:
    """One prompt per question, all with the same long beginning, and a short one that shares nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join((ROOT / name).read_text() for name in ("docs/architecture.md", "LICENSE", "docs/format.md"))
    document = tokenizer(text, add_special_tokens=False)["input_ids"]
    while len(document) < PROMPT_TOKENS:
        document = document + document
    document = document[:PROMPT_TOKENS]
    begin = tokenizer("<|im_start|>user\nHere is a handbook.\n\n", add_special_tokens=False)["input_ids"]
    prompts = []
    for question in QUESTIONS:
        end = tokenizer(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        prompts.append([*begin, *document, *end])
    return prompts, tokenizer("Good morning!", add_special_tokens=False)["input_ids"]


def run(job: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Run one engine process to its end; its answers."""
    path, result = out / "job.json", out / "answers.jsonl"
    result.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "out": str(result)}))
    log = out / "engine.log"
    with log.open("w") as stream:
        code = subprocess.run([sys.executable, HERE / "engine.py", path], stdout=stream, stderr=stream, check=False)
    if code.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"the engine process failed ({log}):\n{tail}")
    ready, *answers = [json.loads(line) for line in result.read_text().splitlines()]
    for i, answer in enumerate(answers):
        say(f"  answer {i + 1}: first token after {answer['ttft_s']:.3f} s, {answer['cached_tokens']} tokens reused")
    return answers


def forget_page_cache(folder: Path) -> int:
    """Drop the files below `folder` from the kernel's page cache, so that reading them means the disk; their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            total += path.stat().st_size
    return total


def row(phase: str, question: int, answer: dict[str, Any], reference: dict[str, Any], prompt: list[int]) -> Row:
    """One line of the report."""
    moved, seconds = counter(answer, "kvcore_load_bytes"), counter(answer, "kvcore_load_seconds")
    if "disk" in phase:
        moved = counter(answer, "kvcore_tier_bytes", "op=load")
        seconds = 0.0  # batches overlap, so their times do not add up to a rate
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


def counter(answer: dict[str, Any], name: str, label: str = "") -> float:
    """Sum of a counter's increases while the question was answered."""
    return sum(v for k, v in answer["counters"].items() if name in k and label in k)


def own_seconds(answer: dict[str, Any]) -> float:
    """Seconds spent in the connector's calls, on the scheduler's side and the worker's."""
    return counter(answer, "kvcore_scheduler_seconds") + counter(answer, "kvcore_worker_seconds")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
