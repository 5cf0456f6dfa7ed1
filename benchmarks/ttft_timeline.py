"""Where the time to a first token goes, in real vLLM: what is found in memory, on disk, and on disk with zstd.

    python benchmarks/ttft_timeline.py --model DIR [--out DIR] [--picture docs/ttft.svg] [--tokens 6037] [--repeat 3]

Each of vLLM's processes writes down when what began and ended (`spans.py`). Of several requests the one of median time
is drawn and taken apart. Prints the parts as a Markdown table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "demo"))

from runs import documents, forget_page_cache, say  # noqa: E402

COLOURS = {
    "schedule": "#b6b6b6", "lookup": "#7b52ab", "plan": "#7b52ab", "result": "#b6b6b6", "read": "#2a7fba",
    "check and decode": "#e08e0b", "copy in": "#2e9e5b", "empty step": "#e4e4e4", "step": "#f3b1a9",
    "forward": "#d1495b", "sample": "#8c2f39",
}  # fmt: skip
BESIDE_STEPS = "worker's copies"
LANES = ("scheduler", "tiers", "worker", BESIDE_STEPS)
WIDTH, LEFT, ROW = 1000, 120, 16


class Span(NamedTuple):
    """One of them. Times in seconds."""

    lane: str
    thread: str
    name: str
    begin: float
    end: float


class Request(NamedTuple):
    """One that was loaded: from `begin`, when the client asked, to `end`, when it had the first token."""

    begin: float
    end: float
    spans: list[Span]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def named(self, *names: str) -> list[Span]:
        return [s for s in self.spans if s.name in names]


# -- the engine's process ----------------------------------------------------------------------------------------------


def child(job: str) -> None:
    """The demo's engine process; the client's calls are written down, too."""
    import engine
    import spans
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    spans.trace(LLMEngine, "add_request", "ask")
    spans.trace(OutputProcessor, "process_outputs", "token", lambda processor, outputs, *rest: bool(outputs))
    sys.argv[1:] = [job]
    engine.main()


def run(job: dict[str, Any], out: Path) -> list[Request]:
    """One engine process to its end; the requests of which something was loaded."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    path = out / "job.json"
    path.write_text(json.dumps({**job, "out": str(out / "answers.jsonl")}))
    search = os.pathsep.join([str(HERE), str(HERE.parent / "examples" / "demo"), os.environ.get("PYTHONPATH", "")])
    with (out / "engine.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, __file__, "--child", str(path)],
            stdout=log, stderr=log, check=False, env={**os.environ, "PYTHONPATH": search, "TTFT_SPANS": str(out)},
        ).returncode  # fmt: skip
    if code:
        raise SystemExit(f"the engine process failed ({out / 'engine.log'})")
    return requests(read(out.glob("*.jsonl")))


def read(files: Iterable[Path]) -> list[Span]:
    """What the processes wrote, in order of its begin. A process is known by what it does."""
    found = []
    for path in files:
        if path.name == "answers.jsonl":
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for thread, name, begin, end in lines:
            if name in ("ask", "token"):
                lane = "client"
            elif thread == "kvcore-copy":
                lane = BESIDE_STEPS
            elif name in ("read", "check and decode"):
                lane = "tiers"
            else:
                lane = "worker" if name in WORKERS else "scheduler"
            found.append(Span(lane, f"{path.stem} {thread}", name, begin, end))
    return sorted(found, key=lambda s: s.begin)


WORKERS = {"copy in", "step", "empty step", "forward", "sample"}


def requests(spans: Sequence[Span]) -> list[Request]:
    """Those between whose question and first token something was copied in."""
    found = []
    asked = [s for s in spans if s.name == "ask"]
    tokens = [s for s in spans if s.name == "token"]
    for ask in asked:
        first = next((t for t in tokens if t.begin > ask.end), None)
        if first is None:
            continue
        within = [s for s in spans if ask.begin <= s.begin <= first.begin and s.lane != "client"]
        if any(s.name == "copy in" for s in within):
            found.append(Request(ask.begin, first.begin, within))
    return found


# -- taken apart -------------------------------------------------------------------------------------------------------


def parts(request: Request) -> dict[str, float]:
    """Seconds of what the client waited for, one part after the other; they sum up to the whole."""
    looked, copied = request.named("lookup")[0], request.named("copy in")
    step = next(s for s in request.named("step") if s.end >= copied[-1].end)
    sampled = next(s for s in request.named("sample") if s.begin >= step.begin)
    loaded = max((s.end for s in request.named("read", "check and decode")), default=looked.end)
    if copied[0].lane == BESIDE_STEPS:  # and beside reading: what is waited for is the rest of them
        begun, copies = step.begin, max(0.0, copied[-1].end - loaded)
        heard, computed = begun - loaded - copies, sampled.end - begun
    else:
        begun, copies = min(step.begin, copied[0].begin), sum(s.end - s.begin for s in copied)
        heard, computed = begun - loaded, sampled.end - begun - copies
    found = {
        "the request reaches the scheduler": looked.begin - request.begin,
        "lookup": looked.end - looked.begin,
        "reading, checking, decoding": loaded - looked.end,
        "copies into the engine's blocks, once all is read": copies,
        "the scheduler hears of it, plans, and tells the worker": heard,
        STEP: computed,
    }
    found["the token reaches the client"] = request.end - sampled.end
    return {name: seconds for name, seconds in found.items() if seconds}


def memcpy(model: Path, tokens: int) -> float:
    """Seconds to copy bfloat16 KV of `tokens` once, in pieces of 1 MiB, both sides touched before: median of nine."""
    import torch

    config = json.loads((model / "config.json").read_text())
    heads, head = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    size = tokens * config["num_hidden_layers"] * 2 * heads * head * 2
    torch.set_num_threads(1)
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    pieces = list(zip(there.split(1 << 20), here.split(1 << 20), strict=True))
    took = []
    for _ in range(9):
        begun = time.perf_counter()
        for to, source in pieces:
            to.copy_(source)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def table(columns: dict[str, Request], copy: float) -> str:
    """The parts of each column in ms, Markdown. `copy`: seconds of a memcpy of as many bytes."""
    taken = {name: parts(request) for name, request in columns.items()}
    order = max(taken.values(), key=len)
    lines = [f"| ms | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    lines += [f"| {part} | {' | '.join(_ms(found.get(part)) for found in taken.values())} |" for part in order]
    lines.append(f"| **first token** | {' | '.join(f'**{_ms(r.seconds)}**' for r in columns.values())} |")
    floors = [found["lookup"] + copy + found[STEP] for found in taken.values()]
    lines.append(f"| floor: lookup + memcpy of as many bytes ({_ms(copy)}) + step | {' | '.join(map(_ms, floors))} |")
    over = [f"{r.seconds / floor:.2f}" for r, floor in zip(columns.values(), floors, strict=True)]
    lines.append(f"| first token / floor | {' | '.join(over)} |")
    busy = {name: [_union(r.named(*what)) for what in BESIDE] for name, r in columns.items()}
    longest = [f["lookup"] + max(b[:3]) + f[STEP] for f, b in zip(taken.values(), busy.values(), strict=True)]
    lines.append(f"| lookup + the longest of the three below + step | {' | '.join(map(_ms, longest))} |")
    over = [f"{r.seconds / floor:.2f}" for r, floor in zip(columns.values(), longest, strict=True)]
    lines.append(f"| first token / that | {' | '.join(over)} |")
    for i, title in enumerate(("reads", "checks and decoding", "copies", "all three, beside each other")):
        lines.append(f"| {title} | {' | '.join(_ms(times[i]) for times in busy.values())} |")
    return "\n".join(lines)


STEP = "the engine's step: what is left of the prompt"
BESIDE = (("read",), ("check and decode",), ("copy in",), ("read", "check and decode", "copy in"))


def _ms(seconds: float | None) -> str:
    return f"{seconds * 1e3:.1f}" if seconds else ""


def _union(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them was running."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda s: s.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


# -- the picture -------------------------------------------------------------------------------------------------------


def picture(columns: dict[str, Request]) -> str:
    """The requests one below the other, on one scale of time, as SVG."""
    scale = (WIDTH - LEFT - 10) / max(r.seconds for r in columns.values())
    drawn, y = list[str](), 14
    for title, request in columns.items():
        drawn.append(f'<text x="4" y="{y}" font-weight="bold">{title}: {request.seconds * 1e3:.0f} ms</text>')
        y += 6
        top = y
        for lane in LANES:
            rows = _rows([s for s in request.spans if s.lane == lane and s.name in COLOURS])
            if not rows:
                continue
            drawn.append(f'<text x="4" y="{y + 12}">{lane}</text>')
            for row in rows:
                for s in row:
                    x, width = LEFT + (s.begin - request.begin) * scale, max(0.6, (s.end - s.begin) * scale)
                    tip = f"<title>{s.name}: {(s.end - s.begin) * 1e3:.2f} ms</title>"
                    place = f'x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{ROW - 2}"'
                    drawn.append(f'<rect {place} fill="{COLOURS[s.name]}">{tip}</rect>')
                y += ROW
        for ms in range(0, int(request.seconds * 1e3) + 1, 20):
            x = LEFT + ms / 1e3 * scale
            drawn.append(f'<path d="M{x:.1f} {top}V{y}" stroke="#00000022"/>')
            drawn.append(f'<text x="{x:.1f}" y="{y + 10}" fill="#666" font-size="9">{ms}</text>')
        y += 30
    x = LEFT
    for name, colour in COLOURS.items():
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 13}" y="{y - 1}">{name}</text>')
        x += 24 + 6 * len(name)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" font-family="sans-serif" '
    background = f'<rect width="{WIDTH}" height="{y + 8}" fill="#fff"/>'
    return "\n".join([head + 'font-size="11">', background, *drawn, "</svg>\n"])


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """A row for each thread; what runs inside another span is drawn over it, for it comes later."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.thread, []).append(span)
    return list(rows.values())


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> None:
    arguments = argparse.ArgumentParser(description="The time to a first token, taken apart.")
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--out", default=Path("build/ttft-timeline"), type=Path)
    arguments.add_argument(
        "--picture", default=None, type=Path, help="where the picture goes (default: the --out folder)"
    )
    arguments.add_argument("--tokens", default=6037, type=int)
    arguments.add_argument("--repeat", default=3, type=int)
    options = arguments.parse_args()
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    tokenizer, prompts = documents(options.model, options.tokens, options.repeat)
    warm_up = tokenizer("Good morning!", add_special_tokens=False)["input_ids"]
    job = {"model": str(options.model.resolve()), "dtype": "bfloat16", "max_tokens": 2, "warm_up": warm_up}
    tiers = {"disk": (out / "plain", "[]"), "disk, zstd": (out / "zstd", "[zstd]")}

    def asked(times: int, *names: str) -> list[Request]:
        lines = [
            f"  - storage: {{plugin: disk, path: {tiers[n][0]}}}\n    serde: {tiers[n][1]}\n    read: always\n"
            for n in names
        ]
        config = out / "kvcore.yaml"
        config.write_text("l1: {size: 2GiB}\nl2:\n" + "".join(lines))
        job["transfer"] = {
            "kv_connector": "TracedConnector", "kv_role": "kv_both", "kv_connector_module_path": "spans",
            "kv_connector_extra_config": {"kvcore.config": str(config)},
        }  # fmt: skip
        steps = [{"prompt": p, "reset": True} for p in prompts for _ in range(times)]
        return run({**job, "steps": steps}, out / "run")

    out.mkdir(parents=True)
    say("cold, then from memory")
    found = {"memory": asked(2, *tiers)}
    for name, (folder, _) in tiers.items():
        forget_page_cache(folder)
        say(f"{name}, a new process")
        found[name] = asked(1, name)
    columns = {name: sorted(some, key=lambda r: r.seconds)[len(some) // 2] for name, some in found.items() if some}
    if len(columns) < len(found):
        raise SystemExit(f"nothing was loaded: {[name for name in found if name not in columns]}")
    for name, some in found.items():
        say(f"{name}: {', '.join(f'{r.seconds * 1e3:.0f}' for r in some)} ms")
    target = options.picture or out / "ttft.svg"
    target.write_text(picture(columns))
    print(table(columns, memcpy(options.model, options.tokens)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.path.insert(0, str(HERE))
        child(sys.argv[2])
    else:
        main()
