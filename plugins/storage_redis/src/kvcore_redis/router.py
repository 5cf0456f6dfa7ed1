"""Commands to where their keys are, replies back in order: redirects, lost connections and nodes that are down."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.api import Failed, StorageError
from kvcore_redis.connection import Command, Reply
from kvcore_redis.node import Node
from kvcore_redis.resp import ReplyError
from kvcore_redis.stream import Lost, reason
from kvcore_redis.topology import Redirect, Topology

HOPS = 4
"""So often a command is sent at most: to where its key was, to where it is, and again when a connection was lost."""


class _Group(NamedTuple):
    """What one node is sent in one go: commands, by their place in the batch."""

    node: Node
    places: list[int]
    asking: bool = False


class Router:
    """Runs batches of commands. Called from several threads at once.

    Args:
        timeout_s: the time that one batch has.
    """

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self._topology = topology
        self._timeout_s = timeout_s

    def run(self, commands: Sequence[Command]) -> list[Reply | Failed]:
        """The reply to each command, or why there is none. One round trip per node, where nothing is amiss.

        All commands must be such that sending one twice does no harm.
        """
        deadline = time.monotonic() + self._timeout_s
        replies: list[Reply | Failed] = [None] * len(commands)
        groups = self._at_home(commands, list(range(len(commands))), replies, deadline)
        for hop in range(HOPS):
            lost: list[int] = []
            moved: dict[Redirect, list[int]] = {}
            for group in groups:
                unanswered = self._exchange(group, commands, replies, deadline)
                lost += unanswered if hop == 0 else []
                for i in group.places:
                    reply = replies[i]
                    if isinstance(reply, ReplyError) and (to := self._topology.redirect(group.node, reply)) is not None:
                        moved.setdefault(to, []).append(i)
            if not (lost or moved):
                break
            lost += moved.pop(Redirect(None), [])
            groups = self._at_home(commands, lost, replies, deadline) if lost else []
            groups += [_Group(to.node, places, to.asking) for to, places in moved.items() if to.node is not None]
        return replies

    def _at_home(
        self, commands: Sequence[Command], places: list[int], replies: list[Reply | Failed], deadline: float
    ) -> list[_Group]:
        """The commands of `places` with the nodes of their keys; nodes that failed last, so that they cost the others
        nothing."""
        try:
            homes = self._topology.route([commands[i].name for i in places], deadline)
        except (OSError, StorageError) as error:
            _fill(replies, places, _failed(error))
            return []
        _fill(replies, [places[i] for i in homes.pop(None, [])], Failed("no node of the cluster has its slot"))
        groups = [_Group(node, [places[i] for i in own]) for node, own in homes.items() if node is not None]
        return groups if len(groups) == 1 else sorted(groups, key=lambda group: group.node.rest.failures)

    def _exchange(
        self, group: _Group, commands: Sequence[Command], replies: list[Reply | Failed], deadline: float
    ) -> list[int]:
        """Ask one node; which commands may be sent again, because the connection was lost."""
        node, places = group.node, group.places
        if self._topology.rests and not node.rest.allow():
            _fill(replies, places, Failed(f"{node} failed and is left alone for a while"))
            return []
        begun, done = time.monotonic(), 0
        if begun >= deadline:
            _fill(replies, places, Failed(f"{node}: no time was left to ask it", "timeout"))
            return []
        try:
            with node.connection(deadline) as connection:
                for reply in connection.pipeline([commands[i] for i in places], asking=group.asking):
                    replies[places[done]] = reply
                    done += 1
        except (OSError, StorageError) as error:
            if not isinstance(error, TimeoutError) or deadline - begun > self._timeout_s / 2:
                self._topology.lost(node)  # else another node took the time, and this one is not to blame
            _fill(replies, places[done:], _failed(error, f"{node}: "))
            return places[done:] if isinstance(error, Lost) else []
        node.rest.answered()
        return []


def _fill(replies: list[Reply | Failed], places: Sequence[int], failure: Failed) -> None:
    for i in places:
        replies[i] = failure


def _failed(error: Exception, place: str = "") -> Failed:
    if isinstance(error, StorageError):
        return Failed(str(error))
    if isinstance(error, TimeoutError):
        return Failed(f"{place}{error}", "timeout")
    return Failed(f"{place}{reason(error)}")
