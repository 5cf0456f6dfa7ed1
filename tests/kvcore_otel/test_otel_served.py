"""The traces of a cache that engines share: made by the server, of requests of both engines."""

import time
from pathlib import Path

from kvcore.engine import Asked
from kvcore.service import open_engine
from kvcore.testing.chunks import hashes, spec
from kvcore.testing.servers.kvcore import KVCoreServer
from otel_collector import Collector, Received

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 60.0


def below(spans: list[Received], above: Received) -> set[str]:
    return {s.name for s in spans if s.parent == above.id and s.trace == above.trace}


def test_a_server_tells_of_its_engines_requests(collector: Collector, tmp_path: Path) -> None:
    hook = {"plugin": "otel", "endpoint": collector.http}
    tier = {"storage": {"plugin": "memory"}, "name": "behind"}
    config = {"l1": {"size": "4MiB"}, "l2": [tier], "min_object_size": "128KiB", "lookup_timeout": "20s"}
    with KVCoreServer(tmp_path, config | {"hooks": [hook]}) as server:
        first, second = (open_engine(str(server.config), name=name) for name in ("a", "b"))
        asked = Asked("chat-1", 96, trace={"traceparent": f"00-{TRACE}-{CALLER}-01"})
        for engine, request in ((first, None), (second, asked)):
            space = engine.register(spec())
            deadline = time.monotonic() + WAIT_S
            while engine.descriptor() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if request is None:
                plan = engine.reserve(space, hashes(3), 0, 3, [list(range(100))])
                engine.publish(plan.id)
                assert engine.drain(WAIT_S) == 0
                engine.clear(space)
                continue
            lookup = engine.lookup(space, hashes(4), 0, request)
            assert lookup.wait(WAIT_S)
            assert lookup.poll() == 3
            engine.retrieve(lookup, 0, [list(range(100))])
            engine.release(lookup)
            plan = engine.reserve(space, hashes(4), 3, 4, [list(range(100))], "chat-1")
            engine.publish(plan.id)
            assert engine.drain(WAIT_S) == 0
        first.close()
        second.close()
        server.stop()  # which tells of roots, too
    spans = collector.until(lambda spans: any(s.name == "kvcore.request" for s in spans))
    (root,) = [s for s in spans if s.name == "kvcore.request"]
    assert (root.trace, root.parent) == (TRACE, CALLER)
    assert root.attributes == {"gen_ai.request.id": "chat-1", "kvcore.prompt_tokens": 96}
    assert root.resource["kvcore.cache"] == "server"
    assert below(spans, root) == {"kvcore.lookup", "kvcore.retrieve", "kvcore.store"}
    lookup_span, store_span = (
        next(s for s in spans if s.parent == root.id and s.name == f"kvcore.{name}") for name in ("lookup", "store")
    )
    assert below(spans, lookup_span) == {"kvcore.tier.exists", "kvcore.tier.load"}
    assert below(spans, store_span) == {"kvcore.tier.exists", "kvcore.tier.store"}
    assert lookup_span.attributes["kvcore.sources.behind"] == 3
    assert lookup_span.attributes["kvcore.broke"] == "absent"
    alone = [s for s in spans if s.trace != TRACE]
    assert {s.name for s in alone if not s.parent} == {"kvcore.store"}
    assert len({s.trace for s in alone}) == 1
