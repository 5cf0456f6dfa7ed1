"""The stream of a server: what its engines store, in the order of their requests."""

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from events_reader import Subscriber

from kvcore.service import open_engine
from kvcore.testing.chunks import spec
from kvcore.testing.servers.kvcore import KVCoreServer


def test_a_server_tells_of_what_all_its_engines_do(
    subscribe: Callable[..., Subscriber], endpoint: str, replay_endpoint: str
) -> None:
    hook = {"plugin": "events", "endpoint": endpoint, "replay_endpoint": replay_endpoint, "block_hashes": "bytes"}
    config = {"l1": {"size": "2MiB"}, "l2": [], "min_object_size": "128KiB", "hooks": [hook]}
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(20)]
    with tempfile.TemporaryDirectory(prefix="kv") as folder, KVCoreServer(Path(folder), config) as server:
        reader = subscribe(endpoint, replay_endpoint=replay_endpoint)
        engines = [open_engine(str(server.config), name=name) for name in ("a", "b")]
        for engine, (first, last) in zip(engines, ((0, 4), (4, 20)), strict=True):
            space = engine.register(spec())
            deadline = time.monotonic() + 15
            while engine.descriptor() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            plan = engine.reserve(space, keys, first, last, [list(range(20))])
            engine.publish(plan.id)
            engine.drain()
        reader.until(lambda: any(e["type"] == "BlockRemoved" for e in reader.events))
        stored = [e for e in reader.events if e["type"] == "BlockStored"]
        assert [(e["block_hashes"][0], e["parent_block_hash"]) for e in stored] == [(keys[0], None), (keys[4], keys[3])]
        assert {(e["tier"], e["block_size"], e["nbytes"]) for e in stored} == {("l1", 32, 128 << 10)}
        assert reader.of("l1") <= set(keys)
        for engine in engines:
            engine.close()
        server.stop()
        reader.until(lambda: reader.events[-1] == {"type": "AllBlocksCleared"})
        assert not +reader.held
