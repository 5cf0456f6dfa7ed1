"""Runs under LMCache's Python: LMCache's own client, as its `bench server` uses it, told by JSON lines what to do."""

import hashlib
import json
import sys
import time
import traceback
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _make_key, _send_lookup

TOKENS = 512
RANKS = 2
PATIENCE_S = 120.0


def main(url: str) -> None:
    client = connect(url)
    for line in sys.stdin:
        what, sequence = json.loads(line)
        try:
            answer = {
                "answer": {"store": store, "lookup": lookup, "retrieve": retrieve, "tokens": tokens}[what](
                    client, sequence
                )
            }
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    client.close()


def connect(url: str) -> ServerBenchClient:
    client = ServerBenchClient(
        BenchConfig(url, "", "cpu", "engine_driven", RANKS, False, TOKENS, "(2,256,16,2,32):bfloat16:4", 256, 16), log
    )
    client.start()
    return client


def log(text: str) -> None:
    print(text, file=sys.stderr)


def store(client: ServerBenchClient, sequence: int) -> str:
    request = client.create_request(sequence, f"store-{sequence}-{time.monotonic_ns()}", "store")
    fill(client, request, torch.Generator().manual_seed(sequence))
    assert client.store(request, 0, request.num_full_tokens).succeeded
    client.end_session(request)
    return digest(client, request)


def lookup(client: ServerBenchClient, sequence: int) -> int:
    request = client.create_request(sequence, f"lookup-{sequence}-{time.monotonic_ns()}", "lookup")
    hit = found(client, request)
    client._req_client.free_lookup_locks(key_of(request), RANKS).result(timeout=PATIENCE_S)
    client.end_session(request)
    return hit


def retrieve(client: ServerBenchClient, sequence: int) -> str:
    request = client.create_request(sequence, f"retrieve-{sequence}-{time.monotonic_ns()}", "retrieve")
    assert found(client, request) == request.total_chunks
    fill(client, request, None)
    assert client.retrieve(request, 0, request.num_full_tokens).succeeded
    client.end_session(request)
    return digest(client, request)


def tokens(client: ServerBenchClient, sequence: int) -> list[int]:
    return list(client.create_request(sequence, f"tokens-{sequence}-{time.monotonic_ns()}", "lookup").token_ids)


def found(client: ServerBenchClient, request: Any) -> int:
    assert _send_lookup(client._req_client, key_of(request), tp_size=RANKS)
    give_up = time.monotonic() + PATIENCE_S
    while (hit := client._req_client.query_prefetch_status(request.request_id).result(timeout=PATIENCE_S)) is None:
        assert time.monotonic() < give_up, "LMCache has not answered the lookup"
        time.sleep(0.01)
    return int(hit)


def key_of(request: Any) -> Any:
    return _make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens, world_size=RANKS)


def fill(client: ServerBenchClient, request: Any, generator: torch.Generator | None) -> None:
    """Other random bytes in each rank's blocks; zeros without a generator."""
    for blocks in each(client, request):
        data = torch.zeros(blocks.shape) if generator is None else torch.randn(blocks.shape, generator=generator)
        blocks.copy_(data.to(blocks.dtype))


def digest(client: ServerBenchClient, request: Any) -> str:
    whole = hashlib.sha256()
    for blocks in each(client, request):
        whole.update(blocks.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def each(client: ServerBenchClient, request: Any) -> Any:
    for worker in client._workers:
        for tensor in worker.kv_caches.values():
            yield tensor.narrow(1, request.block_offset, request.num_blocks)


if __name__ == "__main__":
    main(sys.argv[1])
