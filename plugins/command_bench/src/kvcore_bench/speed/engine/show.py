"""The result for people: a table."""

from kvcore.cli.kit.output import paint, table
from kvcore_bench.speed.engine.counters import behind_share
from kvcore_bench.speed.engine.measuring import Outcome
from kvcore_bench.speed.engine.summary import PHASES, Numbers, Result, Spread
from kvcore_bench.speed.show import number

HEADERS = (
    "SERVER", "PHASE", "REQUESTS", "TTFT P50", "P90", "P99", "ITL P50", "P99", "TOKENS/S", "REUSED", "US/TOKEN",
    "FASTER",
)  # fmt: skip


def show(outcome: Outcome) -> None:
    """Print everything on stdout."""
    sizes = ", ".join(f"{k} {v}" for k, v in outcome.workload.described().items() if k != "name")
    print(f"{outcome.workload.name}: {sizes}; seed {outcome.seed}" + (f", {outcome.turns} times" * (outcome.turns > 1)))
    print()
    table(HEADERS, [row for result in outcome.results for row in _rows(result, outcome.results[0])])
    print()
    for text in notes(outcome):
        print(paint(text, "dim"))


def notes(outcome: Outcome) -> list[str]:
    """What the columns mean, and what is special in this run."""
    texts = [
        "TOKENS/S: of answers. REUSED: of the prompts' tokens. US/TOKEN: TTFT for a computed token (first), for a "
        f"reused one (again). FASTER: TTFT P50 of {outcome.results[0].name} by that of the server.",
    ]
    if not outcome.ruler.measured:
        texts.append("The server does not count tokens: lengths are in words.")
    for result in outcome.results:
        whole = result.numbers()
        if whole.failed:
            texts.append(f"{result.name}: {whole.failed} of {whole.requests} requests failed; they are in no number.")
        if whole.reused is None:
            share = result.reused_share()
            told = "nor do its counters" if share is None else f"its counters say {share:.1%} of everything"
            texts.append(f"{result.name}: answers do not say what was reused; {told}.")
        behind = behind_share(result.counters)
        if behind:
            texts.append(f"{result.name}: {behind:.0%} of what was reused came from behind the engine's own cache.")
        if whole.late_s > 1:
            texts.append(f"{result.name}: does not keep up; a request began {whole.late_s:.1f} s after it was due.")
    return texts


def _rows(result: Result, base: Result) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for phase in PHASES:
        found = result.numbers(phase)
        if not found.requests:
            continue
        cost = result.cost()
        each = cost.computed_us if phase == "first" else cost.reused_us
        share = found.reused_share
        rows.append(
            (
                result.name, phase, str(found.requests), *_times(found.ttft), _time(found.itl and found.itl.p50),
                _time(found.itl and found.itl.p99), number(found.output / found.seconds if found.seconds else None),
                "-" if share is None else f"{share:.1%}", number(each), _faster(found, base.numbers(phase)),
            )
        )  # fmt: skip
    return rows


def _times(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return ("-", "-", "-")
    return (_time(spread.p50), _time(spread.p90), _time(spread.p99))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{number(seconds * 1000)} ms" if seconds < 1 else f"{number(seconds)} s"


def _faster(found: Numbers, base: Numbers) -> str:
    if found.ttft is None or base.ttft is None:
        return "-"
    return f"{base.ttft.p50 / found.ttft.p50:.2f} x"
