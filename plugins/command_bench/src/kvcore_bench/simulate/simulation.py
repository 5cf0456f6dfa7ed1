"""Every policy at every capacity, and the optimum beside them."""

from typing import NamedTuple, TypeAlias

from kvcore.cli.kit.progress import Progress
from kvcore_bench.simulate.capacity import Capacity
from kvcore_bench.simulate.optimum import next_uses, optimum
from kvcore_bench.simulate.policies import Candidate
from kvcore_bench.simulate.replay import Replayed, hashes_of, replay
from kvcore_bench.simulate.trace import Trace

OPTIMUM = "optimum"

Curves: TypeAlias = "dict[str, list[float | None]]"
"""By name, a share of all prompts' tokens for each capacity; None where a policy failed."""


class Simulation(NamedTuple):
    """What came of it. Lists are in the order of `capacities`, the smallest first."""

    trace: Trace
    capacities: list[Capacity]
    policies: list[tuple[Candidate, list[Replayed]]]
    best: list[int]
    """Blocks hit by the optimum."""

    def rate(self, blocks: int) -> float:
        """The share of all prompts' tokens that so many blocks hold."""
        return blocks * self.trace.block_tokens / self.trace.input_tokens

    @property
    def ceiling(self) -> float:
        """The hit rate with room for all blocks: each is missed once."""
        return self.rate(len(self.trace.blocks) - self.trace.distinct)

    @property
    def hit_rates(self) -> Curves:
        """Of every policy, and of the optimum as the last."""
        rates: Curves = {c.label: [None if r.fault else self.rate(r.hits) for r in found] for c, found in self.policies}
        return rates | {OPTIMUM: [self.rate(blocks) for blocks in self.best]}

    @property
    def stranded_rates(self) -> Curves:
        """Of every policy: what was resident when asked for, but behind a missing block."""
        return {c.label: [None if r.fault else self.rate(r.stranded) for r in found] for c, found in self.policies}

    @property
    def faults(self) -> list[str]:
        """What was wrong with policies, a line each."""
        return [
            f"policy {candidate.label} at {capacity.blocks:,} blocks: {result.fault}"
            for candidate, found in self.policies
            for capacity, result in zip(self.capacities, found, strict=True)
            if result.fault
        ]


def simulate(trace: Trace, capacities: list[Capacity], candidates: list[Candidate]) -> Simulation:
    """Run everything. Each run has a policy of its own."""
    uses, hashes = next_uses(trace), hashes_of(trace)
    best: list[int] = []
    results: list[list[Replayed]] = [[] for _ in candidates]
    with Progress("simulating", len(capacities) * (len(candidates) + 1), "runs") as progress:
        for capacity in capacities:
            progress.now(f"{OPTIMUM} at {capacity.label}")
            best.append(optimum(uses, capacity.blocks))
            progress.add(1)
            for candidate, found in zip(candidates, results, strict=True):
                progress.now(f"{candidate.label} at {capacity.label}")
                found.append(replay(trace, hashes, candidate.make(), capacity.blocks))
                progress.add(1)
    return Simulation(trace, capacities, list(zip(candidates, results, strict=True)), best)
