"""Prompts, engine processes and a cold page cache: what the demo and the benchmark of whole engines share."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def documents(model: Path, tokens: int, count: int = 1) -> tuple[Any, list[list[int]]]:
    """The model's tokenizer, and `count` texts of this project of `tokens` tokens that begin differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join((ROOT / name).read_text() for name in ("docs/architecture.md", "LICENSE", "docs/format.md"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    while len(ids) < tokens + 100 * count:
        ids = ids + ids
    return tokenizer, [ids[100 * i : 100 * i + tokens] for i in range(count)]


def questions(model: Path, tokens: int, asked: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """One prompt (ids) per question, all with the same beginning of `tokens` tokens, and a short one that shares
    nothing."""
    tokenizer, (document,) = documents(model, tokens)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    begin = ids("<|im_start|>user\nHere is a handbook.\n\n")
    prompts = [[*begin, *document, *ids(f"\n\n{q}<|im_end|>\n<|im_start|>assistant\n")] for q in asked]
    return prompts, ids("Good morning!")


def kvcore_transfer(flags: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for kvcore with these settings."""
    return {
        "kv_connector": "KVCoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"kvcore.{k}": v for k, v in flags.items()},
    }


def run_engine(job: dict[str, Any], out: Path, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run one engine process to its end; its answers."""
    path, result, log = out / "job.json", out / "answers.jsonl", out / "engine.log"
    result.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "out": str(result)}))
    with log.open("w") as stream:
        command = [sys.executable, str(HERE / "engine.py"), str(path)]
        code = subprocess.run(
            command, stdout=stream, stderr=stream, check=False, env={**os.environ, **(env or {})}
        ).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"the engine process failed ({log}):\n{tail}")
    answers: list[dict[str, Any]] = [json.loads(line) for line in result.read_text().splitlines()][1:]
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


def counter(answer: dict[str, Any], name: str, label: str = "") -> float:
    """Sum of a counter's increases while the prompt was answered."""
    found: float = sum(v for k, v in answer["counters"].items() if name in k and label in k)
    return found


def own_seconds(answer: dict[str, Any]) -> float:
    """Seconds spent in the connector's calls, on the scheduler's side and the worker's."""
    return counter(answer, "kvcore_scheduler_seconds") + counter(answer, "kvcore_worker_seconds")


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)
