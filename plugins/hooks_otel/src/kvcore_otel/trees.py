"""Spans of kvcore made into OpenTelemetry's, with times of their own, within the engine's trace where there is one."""

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvcore.api import Span
from kvcore_otel import __version__

_ERROR_CHARACTERS = 500


class _Ids(IdGenerator):
    """Ids that were made before: a part may be told before what it is a part of."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Made(SpanProcessor):
    """Keeps what has been made until it is taken."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.spans.append(span)


class Trees:
    """Makes spans, on one thread. Sampling, limits and the resource are what OpenTelemetry's variables say.

    Args:
        name: of the cache.
    """

    def __init__(self, name: str) -> None:
        resource = Resource.create({"kvcore.cache": name})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvcore"}))
        self._ids = _Ids()
        self._made = _Made()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(self._made)
        self._tracer = self._provider.get_tracer("kvcore", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._seed = secrets.token_bytes(16)

    def make(self, spans: Sequence[Span]) -> list[ReadableSpan]:
        """Those of them that are sampled."""
        for span in spans:
            self._make(span)
        made, self._made.spans = self._made.spans, []
        return made

    def _make(self, span: Span) -> None:
        context = self._propagator.extract(span.trace or {}, Context())
        engine = get_current_span(context).get_span_context()
        self._ids.trace_id = engine.trace_id if engine.is_valid else self._number(b"trace", span.root, 16)
        self._ids.span_id = self._number(b"span", span.id, 8)
        if span.parent:
            # As its parent was, or will be: samplers go by the trace.
            decision = self._provider.sampler.should_sample(context, self._ids.trace_id, "kvcore").decision
            sampled = decision == Decision.RECORD_AND_SAMPLE
            flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
            parent = self._number(b"span", span.parent, 8)
            above = SpanContext(self._ids.trace_id, parent, False, flags, engine.trace_state)
            context = set_span_in_context(NonRecordingSpan(above), Context())
        attributes = dict(span.attributes)
        if span.id == span.root and span.request:
            attributes["gen_ai.request.id"] = span.request
        made = self._tracer.start_span(span.name, context, attributes=attributes, start_time=span.begin_ns)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error[:_ERROR_CHARACTERS]))
        made.end(span.end_ns)

    def _number(self, kind: bytes, number: int, size: int) -> int:
        """An id that is the same each time it is asked for."""
        digest = blake2b(number.to_bytes(8, "big"), digest_size=size, key=self._seed, person=kind).digest()
        return int.from_bytes(digest, "big") or 1
