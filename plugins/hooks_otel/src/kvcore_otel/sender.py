"""The thread that sends spans, so that nobody else waits for a collector."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcore.api import Span

CLOSE_S = 1.5
"""How long `close` waits for a collector to take what is left. Not at all after it has not taken a batch."""
END_S = 0.5
"""So long the call under way then has to end. Together they are what a collector that hangs costs an engine's end."""
AGAIN = 60
"""Batches between two lines of the log about lost spans."""


class Exporter(Protocol):
    """What sends: an OTLP exporter of OpenTelemetry."""

    def export(self, spans: Sequence[Any]) -> Any:
        """Send them; what has `name` `SUCCESS` when that went well."""

    def shutdown(self) -> None:
        """Give up at once."""


_LOGGERS = ("http.trace_exporter", "grpc.exporter", "grpc.trace_exporter")


class _Hushed(logging.Filter):
    """Keeps what exporters say on one thread from the log, at each of their attempts. `why`: the first of it."""

    def __init__(self, thread_id: int | None) -> None:
        super().__init__()
        self._thread_id = thread_id
        self.why = ""
        for name in _LOGGERS:
            logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread_id:
            return True
        self.why = self.why or record.getMessage()
        return False

    def end(self) -> None:
        for name in _LOGGERS:
            logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}").removeFilter(self)


class Sender:
    """Sends what `put` is given. `put` may be called from any thread, and only ever appends to a queue.

    Args:
        make: makes OpenTelemetry's spans of ours.
        queue_spans: how many may wait.
        batch_spans: how many are sent at once. delay_s: how long a smaller batch waits for more.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Span]], Sequence[Any]],
        exporter: Exporter,
        log: logging.Logger,
        *,
        queue_spans: int,
        batch_spans: int,
        delay_s: float,
    ) -> None:
        self._make = make
        self._exporter = exporter
        self._log = log
        self._queue_spans = queue_spans
        self._batch_spans = min(batch_spans, queue_spans)  # no more than wait
        self._delay_s = delay_s
        self._waiting: deque[Span] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.sent = 0
        self.dropped = 0
        """Spans that found the queue full."""
        self.failed = 0
        """Spans that the collector did not take."""
        self._thread = threading.Thread(target=self._run, name="kvcore-otel", daemon=True)
        self._down = False
        self._thread.start()
        self._hushed = _Hushed(self._thread.ident)

    def put(self, spans: Sequence[Span]) -> None:
        """Send soon. Returns at once; drops what there is no room for."""
        with self._changed:
            if self._closing:
                return
            taken = spans[: self._queue_spans - len(self._waiting)]
            first = not self.dropped and len(taken) < len(spans)
            self.dropped += len(spans) - len(taken)
            before = len(self._waiting)
            self._waiting.extend(taken)
            if not before or len(self._waiting) >= self._batch_spans:
                self._changed.notify()
        if first:
            self._log.warning(
                "otel: more than %d spans wait for the collector: some are dropped (at the end, how many is told)",
                self._queue_spans,
            )

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`; returns within two seconds. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join(0.0 if self._down else CLOSE_S)
        self._exporter.shutdown()
        self._thread.join(END_S)
        self._hushed.end()
        left = len(self._waiting)
        if self.dropped or self.failed or left:
            self._log.warning(
                "otel: %d spans were sent, %d found the queue full, %d the collector did not take, %d were left",
                self.sent, self.dropped, self.failed, left,
            )  # fmt: skip

    def _run(self) -> None:
        lost = 0
        while batch := self._next():
            try:
                made = self._make(batch)
                ok = not made or self._exporter.export(made).name == "SUCCESS"
            except Exception:
                self._log.exception("otel: spans could not be sent")
                made, ok = batch, False
            self._down = not ok
            if ok:
                self.sent += len(made)
                self._hushed.why = ""
                continue
            self.failed += len(made)
            if lost % AGAIN == 0:
                text = "otel: the collector has not taken %d spans so far, and requests go on without (%s)"
                self._log.warning(text, self.failed, self._hushed.why or "it refused them")
            lost += 1

    def _next(self) -> list[Span]:
        """The next batch; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: len(self._waiting) >= self._batch_spans or self._closing, self._delay_s)
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batch_spans))]
