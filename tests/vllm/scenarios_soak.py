"""A soak: conversations without end through one engine whose cache is small, with aborts and files that get damaged."""

import ctypes
import gc
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines import Engine, engine, kvcore_threads, tokens

from taken import taken

CONVERSATIONS, TURNS, ANSWER = 24, 4, 16
FLIGHT = 12
"""Requests at once, at most."""
NEAR = 1e-3
"""Two tokens are equally likely whose log probabilities differ by less: batches of another shape may choose either."""
RECORD = 262_144
"""What became of so many objects is on record."""
_REST_S = 3.0


def soak(models: Path, folder: str, seconds: float, seed: int = 1) -> dict[str, Any]:
    """Each answer is compared with that of an engine without a cache. Returns what was seen, and what the process takes
    each time that all requests have ended."""
    plain = Engine(str(models / "tiny"), None, enable_prefix_caching=False)
    talks = Talks(plain)
    plain.close()
    tier = {"storage": {"plugin": "disk", "path": folder, "capacity": "12MiB"}, "serde": ["zstd"]}
    options = {"kvcore.l1.size": "8MiB", "kvcore.l2": [tier], "kvcore.lookup_timeout": "20s"}
    ran = random.Random(seed)
    seen: Counter[str] = Counter()
    wrong: list[Any] = []
    rests = []
    begun = time.monotonic()
    with engine(str(models / "tiny"), options, num_gpu_blocks_override=30) as e:
        _fill_the_record(e)
        while time.monotonic() < begun + seconds or len(rests) < 3:
            _round(e, talks, ran, seen, wrong, min(30.0, seconds / 3), Path(folder))
            e.settle()
            _give_back()
            rests.append({"taken": taken(os.getpid()), "leaks": e.leaks(), "threads": kvcore_threads()})
        before = taken(os.getpid()).cpu_s
        time.sleep(_REST_S)
        idle = (taken(os.getpid()).cpu_s - before) / _REST_S
        took = sorted(d.seconds for d in e.half.engine.decisions.since())
        stats = e.half.engine.stats()
        faults = e.faults()
        preemptions = next(m.value for m in e.llm.get_metrics() if m.name == "vllm:num_preemptions")
    return {
        "seconds": time.monotonic() - begun, "seen": seen, "wrong": wrong[:10], "rests": rests, "idle": idle,
        "p50": took[len(took) // 2], "p99": took[int(len(took) * 0.99)], "preemptions": preemptions,
        "stats": {k: v for k, v in stats.items() if v}, "faults": faults,
    }  # fmt: skip


class Talks:
    """Conversations: what is asked at each turn, and what an engine without a cache answers."""

    def __init__(self, plain: Engine) -> None:
        ran = random.Random(5)
        systems = [tokens(900 + i, 300) for i in range(3)]
        prompts = [systems[c % 3] + tokens(1000 + c, ran.randrange(20, 200)) for c in range(CONVERSATIONS)]
        self.prompts: list[list[list[int]]] = []
        """By turn and conversation."""
        self.answers: list[list[Any]] = []
        """The same: the tokens, and of each place the two most likely with their log probabilities."""
        for turn in range(TURNS):
            outputs = plain.llm.generate([_prompt(p) for p in prompts], _params(), use_tqdm=False)
            self.prompts.append(prompts)
            self.answers.append([_answer(output) for output in outputs])
            prompts = [
                p + tokens_of + tokens(2000 + 10 * c + turn, ran.randrange(20, 150))
                for c, (p, (tokens_of, _)) in enumerate(zip(prompts, self.answers[-1], strict=True))
            ]

    def judge(self, turn: int, conversation: int, given: list[int]) -> str:
        """`right`, `near` or `wrong`."""
        expected, likely = self.answers[turn][conversation]
        if given == expected:
            return "right"
        at = next(i for i, (a, b) in enumerate(zip(given, expected, strict=True)) if a != b)
        best = likely[at][expected[at]]
        return "near" if best - likely[at].get(given[at], -1e9) < NEAR else "wrong"


def _round(
    e: Engine, talks: Talks, ran: random.Random, seen: "Counter[str]", wrong: list[Any], seconds: float, folder: Path
) -> None:
    """Requests come, go on and are aborted, for so long and until they have ended."""
    run = e.llm.llm_engine
    flying: dict[str, tuple[int, int]] = {}
    turns = Counter[int]()
    end = time.monotonic() + seconds
    while flying or time.monotonic() < end:
        if time.monotonic() < end and len(flying) < FLIGHT and ran.random() < 0.5:
            talking = {c for _, c in flying.values()}
            chosen = ran.choice([c for c in range(CONVERSATIONS) if c not in talking])
            turn = turns[chosen] % TURNS
            name = f"{seen['asked']}"
            run.add_request(name, _prompt(talks.prompts[turn][chosen]), _params())
            flying[name] = turn, chosen
            seen["asked"] += 1
        if flying and ran.random() < 0.01:
            name = ran.choice(list(flying))
            run.abort_request([name])
            del flying[name]
            seen["aborted"] += 1
        if ran.random() < 0.02:
            seen["files damaged"] += _damage(folder, ran)
        for output in run.step():
            if output.finished and output.request_id in flying:
                turn, conversation = flying.pop(output.request_id)
                turns[conversation] += 1
                given = list(output.outputs[0].token_ids)
                verdict = talks.judge(turn, conversation, given)
                seen[verdict] += 1
                seen["cached"] += output.num_cached_tokens
                seen["prompt"] += len(talks.prompts[turn][conversation])
                if verdict == "wrong":
                    wrong.append((turn, conversation, given, talks.answers[turn][conversation][0]))


def _damage(folder: Path, ran: random.Random) -> int:
    """A file of an object is changed, cut or removed; how many were."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 4096]
    if not files:
        return 0
    path, what = ran.choice(files), ran.randrange(3)
    with suppress(FileNotFoundError):  # evicted meanwhile
        if what == 0:
            path.unlink()
        elif what == 1:
            os.truncate(path, path.stat().st_size // 2)
        else:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"\xa5" * 16)
        return 1
    return 0


def _fill_the_record(e: Engine) -> None:
    """The record of what became of objects grows up to a bound, which is no leak: have it reach that now."""
    cache, space, one = e.half.engine, e.half._spaces.of(None, ""), 16_000
    noted = 0
    while noted < RECORD + one:
        ids = [list(range(one * space.chunk_blocks))] * len(space.groups)
        plan = cache.reserve(space, [os.urandom(32) for _ in range(one)], 0, one, ids)
        noted += plan.skipped["l1_full"]
        cache.publish(plan.id, False)


def _give_back() -> None:
    """Garbage goes, and what the C library keeps of freed memory: as much as requests have happened to leave behind."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _prompt(ids: list[int]) -> Any:
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=ids)


def _params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)


def _answer(output: Any) -> tuple[list[int], list[dict[int, float]]]:
    (one,) = output.outputs
    return list(one.token_ids), [{token: x.logprob for token, x in place.items()} for place in one.logprobs]
