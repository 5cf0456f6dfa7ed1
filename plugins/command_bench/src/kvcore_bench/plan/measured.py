"""The speeds of configured tiers, measured with throw-away objects of the size that the model will have."""

from collections.abc import Sequence

from kvcore.api import KVCoreError
from kvcore.cli.kit.heard import heard
from kvcore.cli.kit.opened import Source
from kvcore.cli.kit.output import error
from kvcore.cli.kit.progress import Progress
from kvcore.cli.kit.running import Runs
from kvcore.config import TierConfig
from kvcore_bench.plan.costs import Store
from kvcore_bench.speed.l2_subject import Load, Subject

ROUNDS = 3
LOAD = Load(128 << 20, 128, 32)


def measure(source: Source, tiers: Sequence[TierConfig], object_bytes: int) -> list[Store]:
    """How fast each tier loads, serdes included. What cannot be measured is said on stderr and left out."""
    found = []
    with heard(), Runs() as runner, Progress("measuring", unit="") as progress:
        for config in tiers:
            progress.now(config.name)
            subject: Subject | None = None
            try:
                subject = Subject(runner, config, source.registry, LOAD)
                found.append(_measure(subject, config.name, object_bytes))
            except KVCoreError as e:
                error(f"tier {config.name}: {e}")
            finally:
                if subject is not None and (left := subject.close()):
                    error(left)
    return found


def _measure(subject: Subject, name: str, object_bytes: int) -> Store:
    size = object_bytes // 2 * 2
    count = subject.objects_of([size])[size]
    if not count:
        raise KVCoreError(f"no room for one object of {size} bytes, in memory or in the tier")
    tier = subject.chains[-1]
    with subject.measured(tier, size, count, warm_up=True) as rounds:
        best = 0.0
        for _ in range(ROUNDS):
            rounds.store()
            best = max(best, rounds.load() * 1e9)
        single_s = (rounds.percentile("load", 50) or 0.0) / 1e6
    return Store(name, best, max(0.0, single_s - size / best))
