"""A collector: it takes OTLP over HTTP and gRPC on loopback, and keeps the spans it was sent."""

import gzip
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 60.0


class Received(NamedTuple):
    """A span as it came over the wire. Ids in hex; `parent` empty for a root."""

    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    attributes: dict[str, Any]
    error: str
    resource: dict[str, Any]


class Collector:
    """Listens until `close`. `answer`: the HTTP status that it gives. `held`: requests wait for it before an answer."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.answer = 200
        self.held = threading.Event()
        self.held.set()
        self._changed = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._grpc: Any = None
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def http(self) -> str:
        """Its endpoint for `http/protobuf`."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def grpc(self) -> str:
        """Begin to listen for `grpc`, too; that endpoint."""
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
            TraceServiceServicer,
            add_TraceServiceServicer_to_server,
        )

        collector = self

        class Servicer(TraceServiceServicer):  # type: ignore[misc]
            def Export(self, request: Any, context: Any) -> Any:
                collector.take(request, dict(context.invocation_metadata()))
                return messages.ExportTraceServiceResponse()

        self._grpc = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(Servicer(), self._grpc)
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        return f"http://127.0.0.1:{port}"

    def take(self, request: Any, headers: dict[str, str]) -> None:
        """Keep what a request holds."""
        found = []
        for resource in request.resource_spans:
            about = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                found += [_received(span, about) for span in scope.spans]
        with self._changed:
            self.requests += 1
            self.headers.append(headers)
            self.spans += found
            self._changed.notify_all()

    def until(self, enough: Callable[[list[Received]], object]) -> list[Received]:
        """The spans, once there are enough."""
        give_up = time.monotonic() + WAIT_S
        with self._changed:
            while not enough(self.spans):
                left = give_up - time.monotonic()
                assert left > 0, f"only {[s.name for s in self.spans]} came"
                self._changed.wait(left)
            return list(self.spans)

    def close(self) -> None:
        """Listen no more."""
        self.held.set()
        self._http.shutdown()
        self._http.server_close()
        if self._grpc is not None:
            self._grpc.stop(None)


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.held.wait(WAIT_S)
            assert self.path == "/v1/traces"
            if collector.answer == 200:
                collector.take(ExportTraceServiceRequest.FromString(body), dict(self.headers))
            self.send_response(collector.answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.message if span.status.code == 2 else "",
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
