"""Admission of loads: what the engine computes sooner than a tier delivers it is not loaded.

Compared are the time of all that a lookup would have from its tiers and the engine's time to compute the same tokens,
both as measured. Of the cuts at which a prefix can end, the one that saves most time wins: what is kept is always the
front. While one of the two is not known, everything is loaded.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvcore.l2 import Tier
from kvcore.observe import Metrics, logger

WINDOW = 64
"""So many of an engine's last steps are looked at."""
ENOUGH = 5
"""Steps before which nothing is said."""
MODELS = 256
"""So many models' speeds are known, those that were computed last: engines come with ever new weights."""
FAVOUR = 1.25
"""A load may take so much longer than computing: it leaves the engine free for others."""
CUTS = 32
"""So many cuts are compared, and those at which another tier serves: the best is nearly always one of these."""
PROBE_S = 10.0
"""How often a tier that was refused is tried, beside the requests."""


class Step(NamedTuple):
    """What one more chunk of a prefix costs.

    Args:
        tokens: what need not be computed with it.
        loads: each object's tier and bytes.
    """

    tokens: int
    loads: Sequence[tuple[Tier, int]]


class LoadAdmission:
    """Decides how much of a prefix is loaded. `prefilled` comes from any thread, the rest from the tiers' loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: dict[Hashable, deque[tuple[int, float]]] = {}
        self._speeds: dict[Hashable, float] = {}
        self._next_probe: dict[str, float] = {}

    def prefilled(self, model: Hashable, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of this model's prompts in so long. Garbage is ignored."""
        if not (tokens > 0 and 0 < seconds < float("inf")):
            return
        with self._lock:
            steps = self._steps.pop(model, deque[tuple[int, float]](maxlen=WINDOW))
            self._steps[model] = steps  # the last is the latest
            steps.append((tokens, seconds))
            if len(self._steps) > MODELS:
                oldest = next(iter(self._steps))
                del self._steps[oldest]
                self._speeds.pop(oldest, None)
            if len(steps) >= ENOUGH:
                self._speeds[model] = speed = _middle(steps)
                self._metrics.set("prefill_tokens_per_second", speed)

    def speed(self, model: Hashable) -> float | None:
        """Tokens a second that the engine computes of this model's prompts; None while that is not known."""
        return self._speeds.get(model)

    def cut(self, model: Hashable, steps: Sequence[Step]) -> int:
        """How many of the steps, from the front, are sooner loaded than computed."""
        speed = self._speeds.get(model)
        if speed is None:
            return len(steps)
        best, most_saved = 0, 0.0
        tokens = 0
        nbytes: dict[Tier, int] = {}
        stride, last = max(1, len(steps) // CUTS), len(steps)
        following = _sources(steps[0]) if steps else []
        for n, step in enumerate(steps, 1):
            tokens += step.tokens
            for tier, size in step.loads:
                nbytes[tier] = nbytes.get(tier, 0) + size
            sources, following = following, _sources(steps[n]) if n < last else []
            if n % stride and n < last and sources == following:
                continue
            load_s = max((t.load_seconds(b) for t, b in nbytes.items()), default=0.0)  # tiers load side by side
            saved_s = FAVOUR * tokens / speed - load_s
            if saved_s >= most_saved:
                best, most_saved = n, saved_s
        if best < len(steps):
            logger.debug(
                "%d of %d chunks are not loaded: %s take longer than computing %d tokens at %.0f a second",
                len(steps) - best, len(steps), "/".join(t.name for t in nbytes), tokens, speed,
            )  # fmt: skip
        return best

    def probe_due(self, tier: Tier) -> bool:
        """This tier was refused: is it time to see whether it has become faster? Says yes once per `PROBE_S`."""
        now = self._clock()
        due = self._next_probe.setdefault(tier.name, now + PROBE_S)
        if now < due:
            return False
        self._next_probe[tier.name] = now + PROBE_S
        return True


def _sources(step: Step) -> list[Tier]:
    return [tier for tier, _ in step.loads]


def _middle(steps: Sequence[tuple[int, float]]) -> float:
    """The tokens a second that half of the tokens were computed at, or faster. A step of few tokens, which takes about
    as long as one of many, weighs little."""
    half = sum(tokens for tokens, _ in steps) / 2
    for speed, tokens in sorted(((n / s, n) for n, s in steps), reverse=True):
        half -= tokens
        if half <= 0:
            return speed
    raise AssertionError
