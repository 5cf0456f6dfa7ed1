"""LMCache's server over every configuration file, see `drive.py`. One server takes them one after the other; LMCache's
own client stands for an engine of two ranks, and digests of its KV for texts."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drive
import engine_child
from engine_child import RANKS, TOKENS
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.mp_observability.config import add_observability_args, parse_args_to_observability_config
from lmcache.v1.multiprocess.config import add_mp_server_args, parse_args_to_mp_server_config
from lmcache.v1.multiprocess.server import run_cache_server

from kvcore.testing.servers import free_port

SEQUENCES = (1, 2)
CHUNK = 64
CHUNKS = len(SEQUENCES) * TOKENS // CHUNK


@contextmanager
def opened(models: Path) -> Iterator[tuple[Any, dict[str, drive.Serve]]]:
    """LMCache adds an adapter while it runs, and deletes it again."""
    port = free_port()
    server, lmcache = run_cache_server(*settings(port), return_engine=True, start_prometheus_http_server=False)
    storage = lmcache.storage_manager
    client = engine_child.connect(f"tcp://127.0.0.1:{port}")

    def serve(file: Path) -> drive.Cell:
        number = storage.add_l2_adapter(
            PluginL2AdapterConfig("kvcore_lmcache.adapter", "KVCoreL2Adapter", {"config": str(file)})
        )
        ((_, adapter),) = storage.l2_adapters()

        def seen(digests: list[str], chunks: int) -> drive.Cell:
            status = adapter.report_status()
            faults = [] if status["is_healthy"] and not status["refused_store_objects"] else [status]
            return drive.cell(digests, CHUNKS * CHUNK, chunks * CHUNK, status["stats"], faults)

        try:
            chunks = sum(engine_child.lookup(client, sequence) for sequence in SEQUENCES)
            do = engine_child.retrieve if chunks else engine_child.store
            digests = [do(client, sequence) for sequence in SEQUENCES]
            if not chunks:
                wait(lambda: seen(digests, 0)["stored_objects"] == CHUNKS * RANKS, "all objects are stored")
            return seen(digests, chunks)
        finally:
            storage.delete_l2_adapter(number)
            wait(lambda: emptied(lmcache), "LMCache's own memory is empty")

    yield None, {"lmcache": serve}
    client.close()
    server.close()
    lmcache.close()


def settings(port: int) -> tuple[Any, ...]:
    """As `lmcache server` makes them of its flags."""
    parser = argparse.ArgumentParser()
    for add in (add_mp_server_args, add_storage_manager_args, add_observability_args):
        add(parser)
    flags = ["--port", str(port), "--l1-size-gb", "0.125", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    flags += ["--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven"]
    given = parser.parse_args(flags)
    parsers = (parse_args_to_mp_server_config, parse_args_to_config, parse_args_to_observability_config)
    return tuple(parse(given) for parse in parsers)


def emptied(lmcache: Any) -> bool:
    """Empty what is not in use; is that all?"""
    lmcache.clear()
    return bool(lmcache.report_status()["storage_manager"]["l1_manager"]["total_object_count"] == 0)


def wait(done: Any, what: str) -> None:
    until = time.monotonic() + drive.PATIENCE_S
    while not done():
        assert time.monotonic() < until, f"not in time: {what}"
        time.sleep(0.02)


if __name__ == "__main__":
    drive.main("lmcache", opened)
