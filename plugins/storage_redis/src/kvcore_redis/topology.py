"""Which server has an object: the one server, the master that Sentinels name, or the nodes of a cluster."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from redis.crc import key_slot

from kvcore.api import StorageError
from kvcore_redis.address import Endpoint
from kvcore_redis.config import Login
from kvcore_redis.control import Control, ask
from kvcore_redis.node import Node
from kvcore_redis.resp import ReplyError

SLOTS = 16384
REFRESH_S = 1.0
"""A map that is known is not asked for more often than this."""

Found = TypeVar("Found")


class Redirect(NamedTuple):
    """Where a command goes next; `node` is None for where its key belongs by now."""

    node: Node | None
    asking: bool = False


class Topology(ABC):
    """Finds nodes. Called from several threads; a `deadline` is of `time.monotonic()`."""

    rests = False
    """Whether a node that failed is left alone for a while."""

    @abstractmethod
    def route(self, names: Sequence[bytes], deadline: float) -> dict[Node | None, list[int]]:
        """Which of the keys (by place) each node has; None has those that no node has.

        Raises `OSError` or `StorageError` when nothing is known.
        """

    @abstractmethod
    def nodes(self, deadline: float) -> list[Node]:
        """All nodes that hold objects. Raises as `route` does."""

    def redirect(self, node: Node, refusal: ReplyError) -> Redirect | None:
        """Where to go after `node` has refused so; None: nowhere, the refusal stands."""
        return None

    def lost(self, node: Node) -> None:
        """`node` did not answer."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""


class Single(Topology):
    """One server."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def route(self, names: Sequence[bytes], deadline: float) -> dict[Node | None, list[int]]:
        return {self._node: list(range(len(names)))}

    def nodes(self, deadline: float) -> list[Node]:
        return [self._node]

    def close(self) -> None:
        self._node.close()


class Sentinel(Topology):
    """The master of a name, asked for again whenever the one that is known does not serve."""

    def __init__(
        self,
        master: str,
        sentinels: Sequence[Endpoint],
        login: Login,
        control: Control,
        make: Callable[[Endpoint], Node],
    ) -> None:
        self._name = master
        self._sentinels = list(sentinels)
        self._login = login
        self._control = control
        self._make = make
        self._lock = threading.Lock()
        self._master: Node | None = None
        self._stale = True
        self._closed = False

    def route(self, names: Sequence[bytes], deadline: float) -> dict[Node | None, list[int]]:
        return {self.nodes(deadline)[0]: list(range(len(names)))}

    def nodes(self, deadline: float) -> list[Node]:
        master = self._master
        if master is None or self._stale:
            with _locked(self._lock, deadline):
                if self._master is None or self._stale:
                    self._replace(_first(self._sentinels, self._ask, deadline))
                master = self._master
        assert master is not None
        return [master]

    def redirect(self, node: Node, refusal: ReplyError) -> Redirect | None:
        if refusal.code != "READONLY":  # what was the master is a replica now
            return None
        self.lost(node)
        return Redirect(None)

    def lost(self, node: Node) -> None:
        if node is self._master:
            self._stale = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._master is not None:
                self._master.close()

    def _ask(self, sentinel: Endpoint, timeout_s: float) -> Endpoint:
        try:
            with self._control.client(sentinel, self._login, timeout_s=timeout_s) as client:
                reply: Any = ask(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
        except StorageError as error:
            hint = ": name Sentinels, or leave out `sentinel_master`" if "unknown command" in str(error) else ""
            raise StorageError(f"{error}{hint}") from error
        if not reply:
            raise StorageError(f"the Sentinel {sentinel} knows no master {self._name!r}: correct `sentinel_master`")
        return Endpoint(_text(reply[0]), int(reply[1]))

    def _replace(self, endpoint: Endpoint) -> None:
        if self._master is None or self._master.endpoint != endpoint:
            if self._master is not None:
                self._master.retire()
            self._master = self._make(endpoint)
            if self._closed:
                self._master.close()
        self._stale = False


class Cluster(Topology):
    """The map from slots to masters, brought up to date by what nodes say and when one fails."""

    rests = True

    def __init__(
        self, seeds: Sequence[Endpoint], login: Login, control: Control, make: Callable[[Endpoint], Node]
    ) -> None:
        self._seeds = list(seeds)
        self._login = login
        self._control = control
        self._make = make
        self._lock = threading.Lock()
        self._nodes: dict[Endpoint, Node] = {}
        self._slots: list[Node | None] = []  # empty: not known yet
        self._stale = False
        self._asked_at = 0.0
        self._closed = False

    def route(self, names: Sequence[bytes], deadline: float) -> dict[Node | None, list[int]]:
        self._refresh(deadline)
        slots = self._slots
        homes: dict[Node | None, list[int]] = {}
        for i, name in enumerate(names):
            homes.setdefault(slots[key_slot(name)], []).append(i)
        return homes

    def nodes(self, deadline: float) -> list[Node]:
        self._refresh(deadline)
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def redirect(self, node: Node, refusal: ReplyError) -> Redirect | None:
        if refusal.code == "CLUSTERDOWN":
            self._stale = True
        if refusal.code not in ("MOVED", "ASK"):
            return None
        try:  # MOVED SLOT HOST:PORT, without the host when it is the node's own
            _, slot, place = refusal.text.split(" ")
            host, _, port = place.rpartition(":")
            target = self._at(Endpoint(host or node.endpoint.host, int(port)))
            if refusal.code == "MOVED":
                self._slots[int(slot)] = target
                self._stale = True
        except (ValueError, IndexError):
            return None
        return Redirect(target, refusal.code == "ASK")

    def lost(self, node: Node) -> None:
        node.rest.failed()
        self._stale = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for node in list(self._nodes.values()):
                node.close()

    def _refresh(self, deadline: float) -> None:
        """Ask for the map where that is due. One thread does; the others go on with the map they have."""
        if self._slots and not (self._stale and time.monotonic() >= self._asked_at + REFRESH_S):
            return
        if not self._slots:
            with _locked(self._lock, deadline):
                if not self._slots:
                    self._ask_all(deadline)
        elif self._lock.acquire(blocking=False):
            try:
                self._ask_all(deadline)
            except (OSError, StorageError):
                pass  # the map that is known still tells where to try
            finally:
                self._lock.release()

    def _ask_all(self, deadline: float) -> None:
        self._asked_at = time.monotonic()
        known = sorted(self._nodes.values(), key=lambda node: node.rest.failures)
        servers = dict.fromkeys([*(node.endpoint for node in known), *self._seeds])
        ranges = _first(list(servers), self._ask, deadline)
        slots: list[Node | None] = [None] * SLOTS
        for begin, end, endpoint in ranges:
            slots[begin : end + 1] = [self._at(endpoint)] * (end + 1 - begin)
        self._slots, self._stale = slots, False
        serving = set(slots)
        for node in list(self._nodes.values()):
            if node not in serving:
                self._nodes.pop(node.endpoint, None)
                node.retire()

    def _ask(self, server: Endpoint, timeout_s: float) -> list[tuple[int, int, Endpoint]]:
        try:
            with self._control.client(server, self._login, timeout_s=timeout_s) as client:
                reply: Any = ask(client, "CLUSTER", "SLOTS")
        except StorageError as error:
            hint = ": set `cluster: false`" if "cluster support disabled" in str(error) else ""
            raise StorageError(f"{error}{hint}") from error
        ranges = []
        for begin, end, (host, port, *_), *_ in reply:
            name = _text(host)
            if name != "?":  # the node does not know its own address
                ranges.append((int(begin), int(end), Endpoint(name or server.host, int(port))))
        if not ranges:
            raise ConnectionError(f"{server} knows no node that has slots")
        return ranges

    def _at(self, endpoint: Endpoint) -> Node:
        node = self._nodes.get(endpoint) or self._nodes.setdefault(endpoint, self._make(endpoint))
        if self._closed:
            node.close()
        return node


@contextmanager
def _locked(lock: threading.Lock, deadline: float) -> Iterator[None]:
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TimeoutError("no answer in time")
    try:
        yield
    finally:
        lock.release()


def _first(servers: list[Endpoint], ask: Callable[[Endpoint, float], Found], deadline: float) -> Found:
    """The first answer; each is given an equal share of the time, for one may hang. Without one, what a server said
    weighs more than that another did not answer."""
    failures: list[Exception] = []
    for i, server in enumerate(servers):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return ask(server, left / (len(servers) - i))
        except (OSError, StorageError) as error:
            failures.append(error)
    refusals = [failure for failure in failures if isinstance(failure, StorageError)]
    raise (refusals or failures or [TimeoutError("no answer in time")])[0]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
