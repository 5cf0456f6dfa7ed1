"""Commands to where their keys are, replies back in order: redirects, lost connections and nodes that are down."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvcore.api import Failed, StorageError
from kvcore_redis.connection import Command, Lost, Reply
from kvcore_redis.node import Node
from kvcore_redis.resp import ReplyError
from kvcore_redis.topology import Redirect, Topology

HOPS = 4
"""So often a command is sent at most: to where its key was, where it is, and again when a connection was lost."""
_ANYWHERE = Redirect(None)


@dataclass(slots=True)
class _Group:
    """What one node is sent in one go."""

    node: Node
    asking: bool
    indexes: list[int] = field(default_factory=list)


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
        pending = dict.fromkeys(range(len(commands)), _ANYWHERE)
        for hop in range(HOPS):
            again: dict[int, Redirect] = {}
            for group in self._groups(commands, pending, replies, deadline):
                lost = self._exchange(group, commands, replies, deadline)
                if hop == 0:
                    again.update(dict.fromkeys(lost, _ANYWHERE))
                for i in group.indexes:
                    reply = replies[i]
                    if isinstance(reply, ReplyError):
                        redirect = self._topology.redirect(group.node, reply)
                        if redirect is not None:
                            again[i] = redirect
            if not again:
                break
            pending = again
        return replies

    def _groups(
        self,
        commands: Sequence[Command],
        pending: dict[int, Redirect],
        replies: list[Reply | Failed],
        deadline: float,
    ) -> Iterator[_Group]:
        """The pending commands by node; nodes that failed last, so that they cost the others nothing."""
        groups: dict[tuple[Node, bool], _Group] = {}
        try:
            homes = self._topology.route([commands[i].name for i in pending], deadline)
        except (OSError, StorageError) as error:
            failure = _failed(error, "")
            for i in pending:
                replies[i] = failure
            return
        for (i, redirect), home in zip(pending.items(), homes, strict=True):
            node = redirect.node or home
            if node is None:
                replies[i] = Failed("no node of the cluster has its slot")
                continue
            group = groups.setdefault((node, redirect.asking), _Group(node, redirect.asking))
            group.indexes.append(i)
        yield from sorted(groups.values(), key=lambda group: group.node.rest.failures)

    def _exchange(
        self, group: _Group, commands: Sequence[Command], replies: list[Reply | Failed], deadline: float
    ) -> list[int]:
        """Ask one node; which commands may be sent again because the connection was lost."""
        node, indexes = group.node, group.indexes
        if self._topology.rests and not node.rest.allow():
            for i in indexes:
                replies[i] = Failed(f"{node} failed and is left alone for a while")
            return []
        done = 0
        try:
            with node.connection(deadline) as connection:
                chosen = [commands[i] for i in indexes]
                for i, reply in zip(indexes, connection.pipeline(chosen, asking=group.asking), strict=True):
                    replies[i] = reply
                    done += 1
        except (OSError, StorageError) as error:
            self._topology.lost(node)
            failure = _failed(error, f"{node}: ")
            for i in indexes[done:]:
                replies[i] = failure
            return indexes[done:] if isinstance(error, Lost) else []
        node.rest.answered()
        return []


def _failed(error: Exception, place: str) -> Failed:
    if isinstance(error, StorageError):
        return Failed(str(error))
    if isinstance(error, TimeoutError):
        return Failed(f"{place}no answer in time", "timeout")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Failed(f"{place}{reason}")
