"""One server: its connections, and the rest that it is given after it failed."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from kvcore.api import StorageError
from kvcore_redis.address import Endpoint
from kvcore_redis.connection import Connection, Settings, connect
from kvcore_redis.stream import broken

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class Rest:
    """Leaves a node alone after a failure, each time for twice as long, with one try between.

    The core's circuit breaker does that for a tier. A cluster is one tier: without this, a node that hangs would cost
    every call its whole time, and the objects on the other nodes with it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._clock = clock
        self._until = 0.0

    def allow(self) -> bool:
        """May the node be asked now? While it rests, one caller in each pause may."""
        now = self._clock()
        if now < self._until:
            return False
        if self.failures:  # this caller is the try; others wait for its outcome
            self._until = now + self._pause_s()
        return True

    def failed(self) -> None:
        """The node did not answer."""
        self.failures += 1
        self._until = self._clock() + self._pause_s()

    def answered(self) -> None:
        """The node answered."""
        self.failures, self._until = 0, 0.0

    def _pause_s(self) -> float:
        return float(min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(self.failures - 1, 10)))


class Node:
    """A server and the connections to it: one per call that is under way, kept for the next call.

    Args:
        most: idle connections that are kept.
    """

    def __init__(self, endpoint: Endpoint, settings: Settings, most: int) -> None:
        self.endpoint = endpoint
        self.rest = Rest()
        self._settings = settings
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def __str__(self) -> str:
        return str(self.endpoint)

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._idle) + len(self._busy)

    def connection(self, deadline: float) -> "Call":
        """For a `with` statement: a connection for one call, made when none is idle.

        One that ends with an exception is closed, and every idle one with it: they lead to the same server, or to the
        one that was there before it. Raises `OSError` when the server cannot be reached (of its kind `Lost` when it
        could be before), `StorageError` when it refuses us.
        """
        return Call(self, deadline)

    def take(self, deadline: float) -> Connection:
        """A connection whose operations end by `deadline`. It must be given back or dropped."""
        while (connection := self._idle_one()) is not None:
            if connection.usable:
                break
            self.drop(connection)
        else:
            connection = self._adopt(connect(self.endpoint, self._settings, deadline))
        connection.until(deadline)
        return connection

    def give(self, connection: Connection) -> None:
        """Keep it for the next call."""
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < self._most:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Close it."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def drop_idle(self) -> None:
        """Close those that no call has."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def retire(self) -> None:
        """Close every connection, those of calls that are under way when they are done."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def close(self) -> None:
        """Close every connection; calls that are under way end with an error."""
        self.retire()
        with self._lock:
            for connection in self._busy:
                connection.shut()

    def _idle_one(self) -> Connection | None:
        with self._lock:
            if self._closed:
                raise StorageError(f"{self}: closed")
            if not self._idle:
                return None
            connection = self._idle.pop()
            self._busy.add(connection)
            return connection

    def _adopt(self, connection: Connection) -> Connection:
        with self._lock:
            self._busy.add(connection)
            if self._closed:  # while it was made
                connection.shut()
        return connection


class Call:
    """The time of one call on a connection of `node`; see `Node.connection`."""

    __slots__ = ("_connection", "_deadline", "_node")

    def __init__(self, node: Node, deadline: float) -> None:
        self._node = node
        self._deadline = deadline

    def __enter__(self) -> Connection:
        self._connection = self._node.take(self._deadline)
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._node.give(self._connection)
            return
        self._node.drop(self._connection)
        if isinstance(error, OSError):
            self._node.drop_idle()
            raise broken(error) from error
