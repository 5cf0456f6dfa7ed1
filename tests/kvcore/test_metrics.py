"""Metrics: the list, the calls, and the Prometheus text; and the log that a fault cannot flood."""

import errno
import logging
import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvcore import observe
from kvcore.observe import METRICS, Metrics, Throttle, exposition


def test_every_metric_can_be_used_and_is_in_the_text() -> None:
    metrics = Metrics()
    for name, spec in METRICS.items():
        labels = [f"value of {label}" for label in spec.labels]
        if spec.kind == "counter":
            metrics.add(name, 2, *labels)
            metrics.add(name, 1, *labels)
        elif spec.kind == "gauge":
            metrics.set(name, 9, *labels)
            metrics.set(name, 3, *labels)
        else:
            for seconds in (0.5, 1.5, 1.0):
                metrics.observe(name, seconds, *labels)
    text, values = metrics.text(), metrics.values()
    for name, spec in METRICS.items():
        full = f"kvcore_{name}"
        assert f"# HELP {full}{'_total' if spec.kind == 'counter' else ''} {spec.help}" in text
        suffix = {"counter": "_total", "gauge": "", "histogram": "_sum"}[spec.kind]
        labels = ",".join(f'{label}="value of {label}"' for label in spec.labels)
        assert values[f"{full}{suffix}{{{labels}}}" if labels else f"{full}{suffix}"] == 3
        assert not spec.help.endswith("."), "helps are phrases"
    assert not [v for v in values if "_bucket" in v]
    assert "_created" not in text + str(values)
    assert get_created(), "the host's own metrics are left as they are"


def get_created() -> bool:
    """Whether another registry of this process still exports its `_created` series."""
    own = CollectorRegistry()
    Counter("hosts_own", "help", registry=own).inc()
    return "hosts_own_created" in generate_latest(own).decode()


def test_every_reason_that_the_sources_give_is_documented() -> None:
    root = Path(observe.__file__).parents[1]

    def given(pattern: str, *layers: str) -> set[str]:
        layers = layers or ("control", "engine", "l2", "service")
        return set(re.findall(pattern, "".join(f.read_text() for x in layers for f in (root / x).glob("*.py"))))

    def documented(metric: str, label: str) -> set[str]:
        return set(re.findall(r"`(\w+)`", METRICS[metric].labels[label]))

    failures = given(r'Failed\([^()]*(?:\([^()]*\)[^()]*)*, "(\w+)"\)')
    outcomes, missed = documented("tier_operations", "outcome"), documented("miss_chunks", "reason")
    assert {"serde", "timeout"} <= failures <= outcomes | missed
    lost = given(r'(?:lost|_miss)\("(\w+)"') | given(r'_ABSENT = "(\w+)"') | given(r'else "(\w+)"\)')
    assert {"l1_full", "stalled", "absent"} <= lost <= missed | outcomes
    skipped = given(r'\("(\w+)", (?:known|no_room|last - )') | given(r'skipped(?:\[| = \{|, )"(\w+)"')
    skipped |= given(r'Reserved\(.*\{"(\w+)"')
    assert skipped == documented("store_skipped_chunks", "reason")
    dropped = given(r'"tier_dropped".*"(\w+)"\)') | given(r'reason = (?:0, )?"(\w+)"', "control")
    dropped |= given(r'= 0, "(\w+)"', "control")
    assert {"queue_full", "failed"} <= dropped <= documented("tier_dropped", "reason")
    assert given(r'"l1_bytes", usage\["\w+"\], "(\w+)"') == documented("l1_bytes", "state")
    assert given(r'"serde_bytes".*"(\w+)"\)') == documented("serde_bytes", "side")
    assert given(r'"expired_leases".*"(\w+)"\)') == documented("expired_leases", "kind")


def test_names_and_labels_are_checked() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.add("no_such_metric")
    with pytest.raises(ValueError, match="label"):
        metrics.add("hit_chunks", 1)
    with pytest.raises(ValueError, match="label"):
        metrics.add("hit_chunks", 1, "l1", "too many")


def test_two_engines_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.add("lookups")
    assert (one.values()["kvcore_lookups_total"], other.values()["kvcore_lookups_total"]) == (1, 0)


def test_counts_from_many_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for i in range(500):
            metrics.add("hit_chunks", 1, f"tier-{i % 7}")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = metrics.values()
    assert sum(values[f'kvcore_hit_chunks_total{{source="tier-{i}"}}'] for i in range(7)) == 2000


@pytest.fixture
def served() -> Iterator[Any]:
    server = exposition.serve(Metrics().registry, 0)
    yield server
    server.shutdown()
    server.server_close()


def scraped(server: Any) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
        return bytes(answer.read())


def test_who_goes_before_the_answer_is_nobodys_affair(served: Any, capfd: pytest.CaptureFixture[str]) -> None:
    over, end = threading.Event(), served.shutdown_request

    def ended(request: Any) -> None:
        end(request)
        over.set()

    served.shutdown_request = ended
    with socket.create_connection(("127.0.0.1", served.server_port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    assert over.wait(60)
    assert capfd.readouterr().err == ""
    assert b"kvcore_lookups_total" in scraped(served)


def test_who_asks_nothing_is_waited_for_no_longer_than_that(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exposition._Handler.timeout is not None
    monkeypatch.setattr(exposition._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", served.server_port), timeout=60) as client:
        assert client.recv(1) == b""


def test_a_process_without_free_files_rests_between_two_tries(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, full, slept = WSGIServer.get_request, iter(range(3)), list[float]()

    def accepted(server: WSGIServer) -> Any:
        if next(full, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(WSGIServer, "get_request", accepted)
    monkeypatch.setattr(exposition, "time", SimpleNamespace(sleep=slept.append))
    assert b"kvcore_lookups_total" in scraped(served)
    assert slept == [exposition.LACK_S] * 3


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    throttle = Throttle(clock=lambda: now[0])
    for i in range(100):
        throttle.warning("slow", f"slow {i}")
        throttle.warning("down", f"down {i}")
    assert [r.message for r in caplog.records] == ["slow 0", "down 0"]
    now[0] = 60.0
    throttle.warning("slow", "slow again")
    assert caplog.records[-1].message == "slow again (99 more like it since the last such line)"
    assert all(r.levelno == logging.WARNING and r.name == "kvcore" for r in caplog.records)
