"""Requests that vLLM has no room to run yet: what they need comes from the disk while they wait. Their traces."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from otel_collector import Collector

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(run_child: Any, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("disk"))
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    waiting = json.dumps({"folder": folder, "collector": collector.http, "headers": headers})
    found = run_child(
        f'fill_disk:{{"folder": "{folder}"}}',
        f"queued:{waiting}",
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    return [found[name] for name in found]


def test_what_waiting_requests_need_is_brought_meanwhile(results: Any) -> None:
    filled, waited = results
    assert [tokens for tokens, _ in waited["texts"]] == [tokens for tokens, _ in filled["texts"]]
    brought, used, _ = waited["brought"]
    assert brought >= used > 0
    assert waited["stats"]['kvcore_hit_chunks_total{source="l1"}'] >= used
    assert waited["cached"][0] > 0  # the first one did not wait
    assert waited["faults"] == {}
    assert set(waited["leaks"].values()) == {0}


def test_a_request_is_part_of_its_callers_trace_beside_vllms_own_span(results: Any, collector: Collector) -> None:
    _, waited = results
    spans = collector.until(
        lambda spans: {"llm_request", "kvcore.request"} <= {s.name for s in spans if s.trace == TRACE}
    )
    tree = [s for s in spans if s.trace == TRACE]
    (root,) = [s for s in tree if s.name == "kvcore.request"]
    (vllms,) = [s for s in tree if s.name == "llm_request"]
    assert root.parent == vllms.parent == CALLER
    assert root.attributes == {"gen_ai.request.id": waited["traced"], "kvcore.prompt_tokens": 1500}
    assert waited["traced"].startswith(vllms.attributes["gen_ai.request.id"])  # and what vLLM has made of it
    below = {s.name: s for s in tree if s.parent == root.id}
    assert {"kvcore.queued", "kvcore.lookup", "kvcore.retrieve"} <= set(below)
    assert below["kvcore.lookup"].attributes["kvcore.sources.l1"] == 11
    assert below["kvcore.retrieve"].attributes["kvcore.tokens"] == 1408
    assert vllms.begin <= below["kvcore.lookup"].begin <= below["kvcore.retrieve"].end <= vllms.end


def test_what_is_brought_for_a_waiting_request_is_in_its_tree(results: Any, collector: Collector) -> None:
    spans = collector.until(lambda spans: any(s.name == "kvcore.prefetch" for s in spans))
    names = {s.id: s.name for s in spans}
    brought = [s for s in spans if s.name == "kvcore.prefetch" and s.attributes["kvcore.cause"] == "queued"]
    assert {names.get(s.parent) for s in brought} == {"kvcore.request"}
    loads = [s for s in spans if s.name == "kvcore.tier.load"]
    assert {names.get(s.parent) for s in loads} <= {"kvcore.prefetch", "kvcore.lookup"}
    assert {s.parent for s in loads} & {s.id for s in brought}
    assert not [s.error for s in spans if s.error]
