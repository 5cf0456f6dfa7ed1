"""A lookup that a server answers, and the space it is in."""

import time
from collections.abc import Callable

from kvcore.engine import Coming, Space
from kvcore.observe import Decision
from kvcore.service import wire
from kvcore.service.link import Link

SLACK_S = 2.0
"""How much later than the server's own time-out a lookup is given up, with the server."""
RENEW_SHARE = 0.25
"""A poll starts the leases' time again once so much of it has passed."""


class ServedSpace(Space):
    """A `Space` that a server knows by `id`. `refused`: it has said that it cannot cache this model. `key_scheme`: of
    its hashes."""

    id: int
    key_scheme: str
    refused: bool = False


class RemoteLookup:
    """An `EngineLookup`. Made by `RemoteEngine.lookup`.

    Attributes:
        id: the server's name for it. link: the connection it was asked over, None when there was none.
        held: whether there are leases to release. decision: the record of it, or None.
        groups: where the objects are that can be retrieved, per group.
        coming: what the server has said of the answer to come, see `Engine.coming`.
    """

    def __init__(
        self,
        space: ServedSpace,
        first: int,
        count: int,
        number: int,
        link: Link | None,
        answered: "Callable[[RemoteLookup, float], None]",
    ) -> None:
        """`count`: of the chunks asked for. `answered`: called once, with the seconds it took."""
        self.space = space
        self.first = first
        self.answer: int | None = None
        self.sources: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.broke = self.blame = ""
        self.decision: Decision | None = None
        self.arena = link.token if link is not None else ""
        self.id = number
        self.link = link
        self.held = True
        self.released = False
        self.groups: list[wire.Slots] = []
        self.coming: Coming | None = None
        self._objects = count * len(space.groups)
        self._began = time.monotonic()
        self._leased = self._began  # leases are younger than this by the way to the server, never older
        self._answered = answered

    def poll(self) -> int | None:
        """See `EngineLookup.poll`."""
        link = self.link
        if self.answer is None and link is not None:
            link.listen()
            if self.answer is None and time.monotonic() > self._began + link.welcome.lookup_timeout_s + SLACK_S:
                link.lose("timeout")  # which answers it
        answer = self.answer
        if answer is not None and answer > self.first and not self.renew(RENEW_SHARE):
            gone = link is None or not link.alive
            reason = "no_server" if gone else "lease_expired"
            self.misses[reason] = answer - self.first
            if self.decision is not None and not self.released:
                self.decision.lost(reason)
            self.answer = answer = self.first
        return answer

    def wait(self, timeout_s: float) -> bool:
        """See `EngineLookup.wait`."""
        if self.answer is None and self.link is not None:
            self.link.wait(lambda: self.answer is not None, timeout_s)
        return self.answer is not None

    def renew(self, share: float = 0.0) -> bool:
        """Start the leases' time again, when at least this share of it has passed. False when they have ended."""
        link = self.link
        if link is None or not link.alive or self.released:
            return False
        now = time.monotonic()
        passed = (now - self._leased) / link.welcome.lease_s
        if passed >= 1:
            return False
        if passed >= share and self.held:
            self._leased = now
            return link.tell(wire.Hold(self.id))
        return True

    def take(self, number: int) -> wire.Taken | None:
        """Ask what has come, in the message `number`. None when the leases have ended."""
        begun = time.monotonic()
        answer = self.link.ask(wire.Take(number, self.id)) if self.link is not None and not self.released else None
        if not isinstance(answer, wire.Taken) or not answer.held or not wire.whole(answer.fresh, 0):
            return None
        self._leased = begun
        return answer

    def use(self, tokens: int) -> bool:
        """So many tokens are being read: what was loaded for this lookup stays. False when the leases have ended."""
        link = self.link
        now = time.monotonic()
        if link is None or not link.alive or self.released or now >= self._leased + link.welcome.lease_s:
            return False
        self._leased = now
        return link.tell(wire.Use(self.id, tokens))

    # -- the engine's side -------------------------------------------------------------------------------------------

    def found(self, reply: wire.Found) -> None:
        """The server's answer has come."""
        groups = len(self.space.groups)
        if reply.chunks and (len(reply.groups) != groups or not all(wire.whole(g, reply.chunks) for g in reply.groups)):
            reply = wire.Found(reply.id, 0, reply.held, {}, {"no_server": self._objects}, [], "no_server")
        self.held = reply.held
        self.sources = reply.sources
        self.misses = reply.misses
        self.broke, self.blame = reply.broke, reply.blame
        self.groups = reply.groups
        self._leased = max(self._leased, min(reply.leased, time.monotonic()))
        self._finish(self.first + reply.chunks)

    def lose(self, reason: str) -> None:
        """No answer will come."""
        self.held = False
        self.misses = {reason: self._objects} if self._objects else {}
        self.broke = reason if self._objects else ""
        self._finish(self.first)

    def _finish(self, answer: int) -> None:
        self.answer = answer
        self._answered(self, time.monotonic() - self._began)
