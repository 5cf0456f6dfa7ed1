"""The default policy: which conversations to bring back into L1, and when, before their next turn asks for them.

It foresees all the time and brings something only while what it has foreseen comes true often enough. So it costs no
load to learn that loading ahead would be of no use, or to see that it has become of use.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from kvcore.api import ObjectEvent
from kvcore_prefetch.config import PrefetchConfig
from kvcore_prefetch.conversations import Conversation, Conversations
from kvcore_prefetch.returns import Returns

LOOK_S = 0.25
"""The shortest time between two looks at all conversations that have left L1."""
LOOKS = 16
"""So many looks in the time that something stays in L1."""
AT_ONCE = 4
"""Conversations foreseen in one look: the likeliest."""
ENOUGH = 16
"""Outcomes before which nothing is brought."""
WINDOW = 64
"""Outcomes that are looked at."""
MARGIN = 1.2
"""How much likelier a conversation must return than the one whose place it takes. Without it, those that are as likely
would drive each other out for ever."""
CONFIDENCE = 1.15
"""How much better than needed it must come true before it is begun again."""
FREE = 0.1
"""With such a part of L1 free, nothing is driven out."""
PATIENCE = 4
"""What is not used in so many times the usual stay counts as of no use, though it may still be there."""
MOST_BYTES = 1 << 62
_STAYS = 8


class Foreseen:
    """One conversation that was expected back, and what became of it.

    Attributes:
        real: it was brought, not only foreseen.
        right: it came back while it was in L1, or would have been; None: that is not known yet.
    """

    __slots__ = ("at", "conversation", "real", "right", "within")

    def __init__(self, conversation: Conversation, at: float, within: float, real: bool) -> None:
        self.conversation = conversation
        self.at = at
        self.within = within
        self.real = real
        self.right: bool | None = None


class NextTurns:
    """See above. Fed by one thread, with the time (seconds, of one clock) at which things happened."""

    def __init__(self, config: PrefetchConfig, log: logging.Logger) -> None:
        self._min_used = config.min_used
        self._log = log
        self._conversations = Conversations(config.chunks, self._forgotten)
        self._returns = Returns()
        self._stays: deque[float] = deque(maxlen=WINDOW)
        self._waiting: deque[Foreseen] = deque()
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)
        self._next_look = 0.0
        self._now = 0.0
        self.acting = False
        """What is foreseen is brought."""

    @property
    def right(self) -> float | None:
        """The share of the last outcomes that came true; None while they are too few."""
        return sum(self._outcomes) / len(self._outcomes) if len(self._outcomes) >= ENOUGH else None

    @property
    def within(self) -> float | None:
        """How long what is not used stays in L1, in seconds; None while too little has left it."""
        return median(self._stays) if len(self._stays) >= _STAYS else None

    def turn(self, namespace: bytes, hashes: Sequence[bytes], now: float, *, queued: bool = False) -> None:
        """A request was queued or looked up."""
        self._now = now
        conversation, gap, gone = self._conversations.turn(namespace, hashes, now, queued=queued)
        if gap is not None:
            self._returns.came(conversation.turns - 1, gap)
            foreseen: Foreseen | None = conversation.foreseen
            if foreseen is not None and foreseen.real and gone:  # there was no room to bring it, or no time
                self._waiting.remove(foreseen)
                conversation.foreseen = None
            self._ended(conversation, now, came=True)

    def stored(self, events: Sequence[ObjectEvent], now: float) -> None:
        """Objects came into L1."""
        self._now = now
        self._conversations.stored(events, now)

    def evicted(self, events: Sequence[ObjectEvent], now: float) -> None:
        """Objects left L1."""
        self._now = now
        for conversation, reason in self._conversations.evicted(events):
            foreseen = conversation.foreseen
            if reason == "room":
                self._stays.append(now - (foreseen.at if foreseen and foreseen.real else conversation.used))
            if foreseen and foreseen.real:
                self._ended(conversation, now, came=False)

    def choose(self, now: float, free: float, room: Callable[[bytes], int]) -> list[Conversation]:
        """What to bring now.

        Args:
            free: the part of L1 that holds nothing.
            room: how many bytes may still be brought for a namespace.
        """
        within = self.within
        if within is None or now < self._next_look:
            return []
        self._now = now
        self._next_look = now + max(LOOK_S, within / LOOKS)
        self._judge(now)
        here, gone = self._conversations.here, self._conversations.gone
        returns = self._returns
        returns.update(((c.turns, now - c.used) for some in (here, gone) for c in some), within)
        least = self._min_used
        if free < FREE and here:
            last = next(iter(here))
            least = max(least, MARGIN * returns.chance(last.turns, now - last.used))
        rated = [(returns.chance(c.turns, now - c.used), c) for c in gone if c.foreseen is None]
        ripe = [(p, c) for p, c in rated if p >= least and returns.ripe(c.turns, now - c.used)]
        chosen: list[Conversation] = []
        left: dict[bytes, int] = {}
        for _, conversation in sorted(ripe, key=lambda r: r[0], reverse=True):
            namespace = conversation.namespace
            left.setdefault(namespace, room(namespace) if self.acting else MOST_BYTES)
            left[namespace] -= (nbytes := self._conversations.nbytes(conversation))
            if left[namespace] < 0:
                left[namespace] += nbytes  # another may fit
                continue
            conversation.foreseen = Foreseen(conversation, now, within, self.acting)
            self._waiting.append(conversation.foreseen)
            chosen.append(conversation)
            if len(chosen) == AT_ONCE:
                break
        return chosen if self.acting else []

    # -- what became of it -------------------------------------------------------------------------------------------

    def _ended(self, conversation: Conversation, now: float, *, came: bool) -> None:
        """It has returned, or what was brought has left L1. It may be foreseen again."""
        foreseen: Foreseen | None = conversation.foreseen
        if foreseen is not None:
            foreseen.right = came and (foreseen.real or now - foreseen.at <= foreseen.within)
            conversation.foreseen = None

    def _judge(self, now: float) -> None:
        for foreseen in self._waiting:
            over = foreseen.within * (PATIENCE if foreseen.real else 1)
            if foreseen.right is None and now - foreseen.at > over:
                self._ended(foreseen.conversation, now, came=False)
        while self._waiting and self._waiting[0].right is not None:  # in their order: those that come true are soonest
            self._outcomes.append(bool(self._waiting.popleft().right))
        right = self.right
        if right is None or self.acting == (right >= self._min_used * (1 if self.acting else CONFIDENCE)):
            return
        self.acting = not self.acting
        self._log.info(
            "prefetch: of the last %d next turns foreseen %.0f%% came in time: they are %s",
            len(self._outcomes), 100 * right, "brought from now on" if self.acting else "not brought any more",
        )  # fmt: skip

    def _forgotten(self, conversation: Conversation) -> None:
        self._returns.lost(conversation.turns, self._now - conversation.used)
        self._ended(conversation, self._now, came=False)
