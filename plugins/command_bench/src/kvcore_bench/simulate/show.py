"""What is printed: tables and a plot, or JSON."""

from typing import Any

from kvcore.cli.kit.output import print_json, table
from kvcore_bench.simulate.capacity import format_count
from kvcore_bench.simulate.plot import plot
from kvcore_bench.simulate.simulation import Curves, Simulation
from kvcore_bench.simulate.trace import Trace

_NOTABLE = 0.0005  # the least that is not shown as 0.0 %


def as_json(result: Simulation) -> None:
    """Stable JSON: {trace, capacities: [{blocks, tokens, bytes}], ceiling, optimum: [rate], policies: [{policy, plugin,
    options, results: [{hit_rate, hit_tokens, stranded_rate, seconds, fault}]}]}. Lists are in the order of
    `capacities`. With a fault the other four are null."""
    trace = result.trace
    optimum = list(result.hit_rates.values())[-1]
    print_json(
        {
            "trace": {
                "name": trace.name,
                "format": trace.format,
                "requests": len(trace.ends),
                "input_tokens": trace.input_tokens,
                "block_tokens": trace.block_tokens,
                "blocks": len(trace.blocks),
                "distinct_blocks": trace.distinct,
            },
            "capacities": [{"blocks": c.blocks, "tokens": c.tokens, "bytes": c.nbytes} for c in result.capacities],
            "ceiling": result.ceiling,
            "optimum": optimum,
            "policies": _policies(result),
        }
    )


def as_text(result: Simulation) -> None:
    """For people."""
    trace = result.trace
    print(f"{trace.name} ({trace.format}): {len(trace.ends):,} requests, {trace.input_tokens:,} tokens")
    print(
        f"{trace.distinct:,} different blocks of {trace.block_tokens}; with room for all, {result.ceiling:.1%} is hit\n"
    )
    _table(result, result.hit_rates)
    print()
    print(plot(result.hit_rates, result.capacities))
    wasteful = {n: rates for n, rates in result.stranded_rates.items() if max((r or 0) for r in rates) >= _NOTABLE}
    if wasteful:
        print("\nresident when asked for, but behind a block that was missing: kept for nothing\n")
        _table(result, wasteful)


def unlike(trace: Trace) -> str:
    """That prompts' lengths and their numbers of blocks do not fit."""
    text = (
        f"{trace.name}: {trace.unlike:,} of {len(trace.ends):,} requests have more or fewer blocks than their "
        f"input_length makes at {trace.block_tokens} tokens a block"
    )
    if trace.likely_block_tokens != trace.block_tokens:
        text += (
            f"; they look like blocks of {trace.likely_block_tokens}: try --block-tokens {trace.likely_block_tokens}"
        )
    return text


def _policies(result: Simulation) -> list[dict[str, Any]]:
    return [
        {
            "policy": candidate.label,
            "plugin": candidate.plugin,
            "options": candidate.options,
            "results": [
                {
                    "hit_rate": None if r.fault else result.rate(r.hits),
                    "hit_tokens": None if r.fault else r.hits * result.trace.block_tokens,
                    "stranded_rate": None if r.fault else result.rate(r.stranded),
                    "seconds": None if r.fault else round(r.seconds, 3),
                    "fault": r.fault,
                }
                for r in found
            ],
        }
        for candidate, found in result.policies
    ]


def _table(result: Simulation, curves: Curves) -> None:
    sized = result.capacities[0].nbytes is not None
    headers = [*(["SIZE"] if sized else []), "TOKENS", "BLOCKS", *curves]
    rows = [
        [
            *([c.label] if sized else []),
            format_count(c.tokens),
            f"{c.blocks:,}",
            *("fault" if rates[i] is None else f"{rates[i]:.1%}" for rates in curves.values()),
        ]
        for i, c in enumerate(result.capacities)
    ]
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (headers, *rows)]
    table(aligned[0], aligned[1:])
