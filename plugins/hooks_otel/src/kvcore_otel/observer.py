"""The observer: it takes what the cache tells, and is done; a thread of its own sends it."""

import os
from collections.abc import Sequence
from typing import Any

from kvcore.api import Context, Span, hookimpl
from kvcore_otel.config import OtelConfig
from kvcore_otel.sender import Sender

_BATCH_SPANS = 512
_DELAY_MS = 5000


class OtelObserver:
    """Sends from `kvcore_opened` to `kvcore_closed`."""

    def __init__(self, config: OtelConfig, context: Context) -> None:
        self._config = config
        self._log = context.log
        self._sender: Sender | None = None

    @hookimpl
    def kvcore_opened(self, name: str) -> None:
        """Begin. A collector that is not there does not matter."""
        off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if off or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
            self._log.info("otel: nothing is sent, as OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER says")
            return
        from kvcore_otel.trees import Trees

        self._sender = Sender(
            Trees(name).make,
            _exporter(self._config),
            self._log,
            queue_spans=self._config.queue_spans,
            batch_spans=_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH_SPANS),
            delay_s=_number("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS) / 1000,
        )

    @hookimpl
    def kvcore_closed(self, name: str) -> None:
        """Send what waits, for two seconds at most."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    @hookimpl
    def kvcore_spans(self, spans: Sequence[Span]) -> None:
        """See the hook."""
        if self._sender is not None:
            self._sender.put(spans)


def _exporter(config: OtelConfig) -> Any:
    if config.chosen_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(config.endpoint, insecure=config.endpoint.startswith("http://")) if config.endpoint else Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(f"{config.endpoint.rstrip('/')}/v1/traces") if config.endpoint else Http()


def _number(variable: str, default: int) -> int:
    """At least 1; the default where the variable is no number, as OpenTelemetry does."""
    text = os.environ.get(variable, "")
    return max(1, int(text)) if text.isascii() and text.isdigit() else default
