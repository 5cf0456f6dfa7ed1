"""Which tiers have which objects: all are asked at once, and one that does not answer holds up nobody."""

import asyncio
from collections.abc import Sequence

from kvcore.api import ObjectKey
from kvcore.control.loop import LoopThread
from kvcore.l2 import Tier

PATIENCE_S = 0.01
"""Once every object has a source, how long a tier that comes earlier in the order may still take to claim it."""


def unheard(silent: Sequence[Tier]) -> tuple[str, str]:
    """Why what no tier has named is not there, and the tiers that may have it all the same."""
    down = [tier.name for tier in silent if not tier.breaker.closed]
    names = ",".join(down or [tier.name for tier in silent])
    return ("tier_down" if down else "no_answer" if silent else "absent"), names


async def locate(
    loop: LoopThread,
    tiers: Sequence[Tier],
    keys: Sequence[ObjectKey],
    *,
    patience_s: float,
    earlier_s: float = PATIENCE_S,
    silent: list[Tier] | None = None,
) -> list[Tier | None]:
    """The source of each object: the first of the tiers that says it has it. One that does not answer in time has
    nothing. On the loop.

    Args:
        patience_s: how long tiers are waited for while some objects have no source.
        earlier_s: the same once all have one, for tiers that come before it.
        silent: where to name those that have said nothing.
    """
    asked = {loop.spawn(tier.ask(keys)): i for i, tier in enumerate(tiers)}
    sources: list[int | None] = [None] * len(keys)
    heard: set[int] = set()
    pending = set(asked)
    clock = asyncio.get_running_loop().time
    give_up = clock() + patience_s
    patient = True
    while pending:
        timeout_s = max(0.0, give_up - clock())
        done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        for task in done:
            i = asked[task]
            if (found := task.result()) is None:
                continue
            heard.add(i)
            for k, there in enumerate(found):
                best = sources[k]
                if there and (best is None or i < best):
                    sources[k] = i
        if pending and None not in sources:
            last = max(i for i in sources if i is not None)
            if not any(asked[task] < last for task in pending):
                break  # they could change nothing
            if patient:
                patient, give_up = False, min(give_up, clock() + earlier_s)
    if silent is not None and None in sources:
        silent += [tier for i, tier in enumerate(tiers) if i not in heard]
    return [None if i is None else tiers[i] for i in sources]
