"""The thread that publishes, and answers who asks for what was published before."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from kvcore.api import ObjectEvent
from kvcore_events.batches import Translator, What
from kvcore_events.config import EventsConfig
from kvcore_events.wire import END_SEQ, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

CLOSE_S = 1.0
BATCH_OBJECTS = 512
"""Objects per batch, or those of one call of the cache."""
_SUBSCRIBER_BATCHES = 100_000
"""Batches that wait for a slow subscriber; more are dropped for this one, which sees it by the sequence numbers."""


class Publisher:
    """Publishes what `put` is given. `put` may be called from any thread and only ever appends to a queue.

    Raises `zmq.ZMQError` when an endpoint cannot be bound.
    """

    def __init__(self, config: EventsConfig, log: logging.Logger) -> None:
        self._config = config
        self._log = log
        self._lock = threading.Lock()
        self._waiting: deque[tuple[What, Sequence[ObjectEvent]]] = deque()
        self._objects = 0
        self._lost = 0
        self._dropped = 0
        self._closing = False
        self._seq = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pub = self._socket(zmq.PUB, config.endpoint)
            self._router = self._socket(zmq.ROUTER, config.replay_endpoint) if config.replay_endpoint else None
        except BaseException:
            self._context.destroy(0)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="kvcore-events", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Objects that found the queue full."""
        return self._dropped

    def put(self, what: What, objects: Sequence[ObjectEvent]) -> None:
        """Publish soon. Returns at once; drops `objects` when too many wait."""
        with self._lock:
            if self._closing:
                return
            if self._objects + len(objects) > self._config.queue_objects:
                self._lost += 1
                first, self._dropped = not self._dropped, self._dropped + len(objects)
            else:
                first = False
                self._waiting.append((what, objects))
                self._objects += len(objects)
                if len(self._waiting) == 1:
                    os.eventfd_write(self._wake, 1)
        if first:
            self._log.warning("events: more than %d objects wait: some are not told", self._config.queue_objects)

    def close(self) -> None:
        """Publish what waits and say that nothing is there any more. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(2 * CLOSE_S)
        if self._dropped:
            self._log.warning("events: %d objects were not told", self._dropped)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        translator = Translator(whole=self._config.block_hashes == "bytes")
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            self._publish([AllBlocksCleared()])
            while not self._closing or self._waiting:
                for source, _ in poller.poll():
                    if source is self._router:
                        self._replay()
                    else:
                        os.eventfd_read(self._wake)
                        self._publish_waiting(translator)
            self._publish([AllBlocksCleared()])
        except Exception:
            self._log.exception("events: the stream has ended")
        finally:
            self._context.destroy(int(CLOSE_S * 1000))
            with self._lock:
                self._closing = True  # nobody writes to `_wake` any more
                os.close(self._wake)

    def _publish_waiting(self, translator: Translator) -> None:
        while True:
            with self._lock:
                taken, count = [], 0
                while self._waiting and count < BATCH_OBJECTS:
                    taken.append(self._waiting.popleft())
                    count += len(taken[-1][1])
                self._objects -= count
                lost, self._lost = self._lost, 0
            if not taken:
                return
            self._publish([event for what, objects in taken for event in translator.events(what, objects)])
            self._seq += lost  # after what waited before them: the queue was full of it

    def _publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        batch = EventBatch(time.time(), list(events), self._config.data_parallel_rank)
        payload = msgspec.msgpack.encode(batch)
        self._pub.send_multipart((self._topic, self._seq.to_bytes(8, "big"), payload))
        if self._router is not None:
            self._kept.append((self._seq, payload))
            self._kept_bytes += len(payload)
            while self._kept_bytes > self._config.replay_size:
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._seq += 1

    def _replay(self) -> None:
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for seq, payload in self._kept:
            if seq >= start:
                self._router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        self._router.send_multipart((client, b"", b"", END_SEQ, b""))

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_SUBSCRIBER_BATCHES)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(endpoint)
        return socket
