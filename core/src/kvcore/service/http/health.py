"""Is everything still turning? Asked when somebody wants to know: nothing runs for it while nobody does.

A loop is asked by a callback that it has to call; one that does not within `PATIENCE_S` is stuck, since the first
question that it left open. The reaper leaves the time of its last round. A tier is stuck while a call into its storage
or serde hangs beyond its deadline; one that fails, or is away, is left alone by its circuit breaker and is degraded.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvcore.control.manager import REAP_S, StorageManager
from kvcore.l2 import Tier
from kvcore.service.http.models import CheckModel, HealthModel, Status
from kvcore.service.inspect.models import when

PATIENCE_S = 1.0
"""So long a loop may be busy with something else."""
REAPER_S = 5 * REAP_S
"""So late the reaper may be."""

Post = Callable[[Callable[[], None]], object]
"""Has a loop call something soon, from another thread."""


class Pulse:
    """One loop. Used on the asyncio loop that asks."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._asked: tuple[float, asyncio.Future[None]] | None = None

    async def since(self) -> float | None:
        """When (monotonic) it was first asked and has not answered; None: it turns."""
        if self._asked is None:
            here = asyncio.get_running_loop()
            answer = here.create_future()
            self._asked = (time.monotonic(), answer)
            self._post(lambda: self._answer(here, answer))
        at, answer = self._asked
        for _ in range(2):  # the process may have stood still during one half, and nobody could answer
            await asyncio.wait((answer,), timeout=PATIENCE_S / 2)
        return None if answer.done() else at

    def _answer(self, here: asyncio.AbstractEventLoop, answer: "asyncio.Future[None]") -> None:
        """On the loop that was asked."""
        with suppress(RuntimeError):  # who asked is gone
            here.call_soon_threadsafe(self._answered, answer)

    def _answered(self, answer: "asyncio.Future[None]") -> None:
        answer.set_result(None)
        self._asked = None


class Health:
    """What `/healthz` and `/readyz` say.

    Args:
        loops: name -> how to have that loop call something, beside the tiers' own loop.
    """

    def __init__(self, manager: StorageManager, loops: Mapping[str, Post]) -> None:
        self._manager = manager
        self._pulses = {name: Pulse(post) for name, post in {"tiers": manager.loop.post, **loops}.items()}

    async def live(self) -> HealthModel:
        """Stuck is what a restart may heal and nothing else will: a loop, the reaper, a tier in which calls hang."""
        return _sum(await self._loops() + [_tier(t) for t in list(self._manager.tiers)])

    async def ready(self) -> HealthModel:
        """Can requests be served? Whatever the tiers do, they can."""
        return _sum(await self._loops())

    async def _loops(self) -> list[CheckModel]:
        since = await asyncio.gather(*(pulse.since() for pulse in self._pulses.values()))
        checks = []
        for name, at in zip(self._pulses, since, strict=True):
            text = "" if at is None else "its loop does not turn: something that runs on it blocks, or it has ended"
            checks.append(_check(f"loop {name}", at, text))
        last = self._manager.reaped_at
        late = last if time.monotonic() - self._manager.reap_by > REAPER_S else None
        checks.append(_check("reaper", late, "" if late is None else "leases that run out are not taken back"))
        if self._manager.closed:
            checks.append(CheckModel(name="cache", status="stuck", since=None, detail="it has been closed"))
        return checks


def _tier(tier: Tier) -> CheckModel:
    name, stuck_s = f"tier {tier.name}", tier.stuck_s
    if stuck_s is not None:
        text = "calls into its storage or serde hang beyond their deadline"
        return _check(name, time.monotonic() - stuck_s, text)
    if not tier.usable:
        text = "its circuit breaker leaves it alone, /tiers says why; requests go on without it"
        return CheckModel(name=name, status="degraded", since=when(tier.breaker.opened_at), detail=text)
    return _check(name, None, "")


def _check(name: str, since: float | None, detail: str) -> CheckModel:
    if since is None:
        return CheckModel(name=name, status="ok", since=None, detail=detail)
    return CheckModel(name=name, status="stuck", since=when(since), detail=detail)


def _sum(checks: list[CheckModel]) -> HealthModel:
    found = {c.status for c in checks}
    status: Status = "stuck" if "stuck" in found else "degraded" if "degraded" in found else "ok"
    return HealthModel(status=status, checks=checks)
