"""Spans on their way: ids, times, the engine's trace, sampling, and what a collector can do to them."""

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.api import ConfigError, Context, PluginError, Span
from kvcore.plugins import PluginSpec, Registry
from kvcore_otel.config import OtelConfig
from kvcore_otel.observer import OtelObserver
from kvcore_otel.sender import CLOSE_S, END_S, Sender
from otel_collector import Collector

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}


def tree(first: int = 1, trace: dict[str, str] | None = None, request: str = "req-1") -> list[Span]:
    """The parts of a request, and then the request."""
    of = (first, request, trace)
    return [
        Span("kvcore.tier.load", first + 2, first + 1, *of, 2_000, 3_000, {"kvcore.tier": "d"}, "gone"),
        Span("kvcore.lookup", first + 1, first, *of, 1_000, 4_000, {"kvcore.chunks": 3}),
        Span("kvcore.request", first, 0, *of, 1_000, 9_000, {}),
    ]


@pytest.fixture
def observer() -> Iterator[Callable[..., OtelObserver]]:
    """An observer that has been told of a cache's opening."""
    opened: list[OtelObserver] = []

    def make(**options: Any) -> OtelObserver:
        made = OtelObserver(OtelConfig(**options), Context(log=logging.getLogger("kvcore")))
        made.kvcore_opened("tests")
        opened.append(made)
        return made

    yield make
    for one in opened:
        one.kvcore_closed("tests")


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_tree_without_an_engines_trace_is_one_of_its_own(
    collector: Collector, observer: Callable[..., OtelObserver], protocol: str
) -> None:
    endpoint = collector.http if protocol != "grpc" else collector.grpc()
    hook = observer(endpoint=endpoint, protocol=protocol)
    hook.kvcore_spans(tree()[:2])
    collector.until(lambda spans: len(spans) == 2)  # told before their root
    hook.kvcore_spans(tree()[2:])
    hook.kvcore_spans(tree(first=11, request="req-2"))
    load, lookup, request, *others = collector.until(lambda spans: len(spans) == 6)
    assert [s.name for s in (load, lookup, request)] == ["kvcore.tier.load", "kvcore.lookup", "kvcore.request"]
    assert (load.parent, lookup.parent, request.parent) == (lookup.id, request.id, "")
    assert (lookup.begin, lookup.end) == (1_000, 4_000)
    assert (load.error, lookup.error) == ("gone", "")
    assert load.attributes == {"kvcore.tier": "d"}
    assert request.attributes == {"gen_ai.request.id": "req-1"}
    assert request.resource["service.name"] == "kvcore"
    assert request.resource["kvcore.cache"] == "tests"
    assert len({s.trace for s in (load, lookup, request)}) == 1
    assert len({s.trace for s in others}) == 1
    assert len({s.id for s in (load, lookup, request, *others)}) == 6
    assert load.trace != others[0].trace


def test_an_engines_trace_is_joined(collector: Collector, observer: Callable[..., OtelObserver]) -> None:
    observer(endpoint=collector.http).kvcore_spans(tree(trace=SAMPLED))
    load, lookup, request = collector.until(lambda spans: len(spans) == 3)
    assert {s.trace for s in (load, lookup, request)} == {TRACE}
    assert (load.parent, lookup.parent, request.parent) == (lookup.id, request.id, CALLER)


def test_what_its_caller_does_not_sample_is_not_sent(
    collector: Collector, observer: Callable[..., OtelObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = observer(endpoint=collector.http)
    hook.kvcore_spans(tree(trace=UNSAMPLED))
    hook.kvcore_spans(tree(first=11))
    assert {s.trace == TRACE for s in collector.until(lambda spans: len(spans) >= 3)} == {False}
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    only_callers = observer(endpoint=collector.http)
    only_callers.kvcore_spans(tree(first=21))
    only_callers.kvcore_spans(tree(first=31, trace=SAMPLED))
    assert {s.trace for s in collector.until(lambda spans: len(spans) >= 6)[3:]} == {TRACE}


def test_a_share_of_the_trees_is_sent_whole(
    collector: Collector, observer: Callable[..., OtelObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    hook = observer(endpoint=collector.http)
    for i in range(200):
        hook.kvcore_spans(tree(first=1 + 10 * i, request=str(i)))
    hook.kvcore_closed("tests")
    parts: dict[str, int] = {}
    for span in collector.spans:
        parts[span.trace] = parts.get(span.trace, 0) + 1
    assert set(parts.values()) == {3}
    assert 50 < len(parts) < 150  # of 200; outside of it once in 10**11 runs


def test_what_is_no_trace_context_is_none(collector: Collector, observer: Callable[..., OtelObserver]) -> None:
    hook = observer(endpoint=collector.http)
    hook.kvcore_spans(tree(trace={"traceparent": "no such thing", "tracestate": "\0"}))
    assert collector.until(lambda spans: len(spans) == 3)[2].parent == ""


def test_opentelemetrys_variables(
    collector: Collector, observer: Callable[..., OtelObserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.http)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-cache")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    observer().kvcore_spans(tree())
    (span, *_) = collector.until(lambda spans: len(spans) == 3)
    assert span.resource["service.name"] == "my-cache"
    assert span.resource["deployment.environment"] == "test"
    assert {k.lower(): v for k, v in collector.headers[0].items()}["x-key"] == "secret"
    for variable, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as more:
            more.setenv(variable, value)
            silent = observer()
            silent.kvcore_spans(tree())
            silent.kvcore_closed("tests")
    assert len(collector.spans) == 3


def test_a_collector_that_is_gone_hurts_nobody(
    collector: Collector, observer: Callable[..., OtelObserver], caplog: pytest.LogCaptureFixture
) -> None:
    collector.answer = 400  # which is not tried again
    hook = observer(endpoint=collector.http)
    for i in range(3):
        hook.kvcore_spans(tree(first=1 + 10 * i))
    deadline = time.monotonic() + 60
    while hook._sender is not None and hook._sender.failed < 9:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    collector.answer = 200
    hook.kvcore_spans(tree(first=101))
    collector.until(lambda spans: len(spans) == 3)
    hook.kvcore_closed("tests")
    texts = [r.getMessage() for r in caplog.records if r.name == "kvcore"]
    (text,) = (text for text in texts if "has not taken" in text)
    assert "400" in text
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert texts[-1] == "otel: 3 spans were sent, 0 found the queue full, 9 the collector did not take, 0 were left"


def test_nobody_waits_for_a_collector_that_is_not_there(
    observer: Callable[..., OtelObserver], caplog: pytest.LogCaptureFixture
) -> None:
    hook = observer(endpoint="http://127.0.0.1:1")
    hook.kvcore_spans(tree())
    sender = hook._sender
    assert sender is not None
    deadline = time.monotonic() + 60
    while not sender._hushed.why:  # it tries again and again
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sender._down = True  # as after such a batch
    hook.kvcore_closed("tests")
    assert not sender._thread.is_alive()
    texts = [r.getMessage() for r in caplog.records]
    assert "refused" in texts[0]
    assert texts[-1] == "otel: 0 spans were sent, 0 found the queue full, 3 the collector did not take, 0 were left"
    assert len(texts) == 2


def test_a_full_queue_drops_and_counts(
    collector: Collector, observer: Callable[..., OtelObserver], caplog: pytest.LogCaptureFixture
) -> None:
    collector.held.clear()  # it is slow
    hook = observer(endpoint=collector.http, queue_spans=7)
    hook.kvcore_spans(tree())
    sender = hook._sender
    assert sender is not None
    deadline = time.monotonic() + 60
    while sender._waiting:  # the first three are on their way
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun = time.monotonic()
    for i in range(1, 5):
        hook.kvcore_spans(tree(first=1 + 10 * i))
    assert time.monotonic() - begun < 5  # it waits for nobody
    assert sender.dropped == 5
    collector.held.set()
    collector.until(lambda spans: len(spans) == 10)
    hook.kvcore_closed("tests")
    texts = [r.getMessage() for r in caplog.records if r.name == "kvcore"]
    assert "more than 7 spans wait" in texts[0]
    assert texts[-1] == "otel: 10 spans were sent, 5 found the queue full, 0 the collector did not take, 0 were left"


def test_a_full_queue_waits_for_no_larger_batch() -> None:
    class Taking:
        def export(self, spans: Any) -> Any:
            return SimpleNamespace(name="SUCCESS")

        def shutdown(self) -> None:
            pass

    sender = Sender(list, Taking(), logging.getLogger("kvcore"), queue_spans=3, batch_spans=512, delay_s=600.0)
    sender.put(tree())
    deadline = time.monotonic() + 60
    while not sender.sent:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sender.close()
    assert (sender.sent, sender.dropped) == (3, 0)


def test_a_cache_closes_although_its_collector_hangs(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore_otel.sender.CLOSE_S", 0.2)

    class Hanging:
        def export(self, spans: Any) -> Any:
            collector.held.wait(300)
            raise OSError("given up")

        def shutdown(self) -> None:
            collector.held.set()

    collector.held.clear()
    log = logging.getLogger("kvcore")
    sender = Sender(list, Hanging(), log, queue_spans=100, batch_spans=2, delay_s=0.01)
    sender.put(tree())
    sender.close()
    sender.put(tree())  # of no use, and harmless
    sender.close()
    assert CLOSE_S + END_S <= 2.0
    assert "otel: 0 spans were sent" in caplog.records[-1].getMessage()


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> Any:
        return Registry().use_hooks([PluginSpec("otel", options, "hooks[0]")])

    assert make().listens("spans")
    with pytest.raises(ConfigError, match=r"is no endpoint: write one such as http://127\.0\.0\.1:4318"):
        make(endpoint="127.0.0.1:4318")
    with pytest.raises(ConfigError, match="queue_spans"):
        make(queue_spans=0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises((ConfigError, PluginError), match="is 'http/json': this plugin speaks http/protobuf and grpc"):
        make()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert make().listens("spans")
    monkeypatch.setattr("kvcore_otel.config.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r'protocol grpc needs another package: run pip install "kvcore-ot'):
        make()
