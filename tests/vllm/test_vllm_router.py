"""The example's router: what it makes of real events, and that it beats taking turns over two real engines."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.testing.servers import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # importing vLLM warns

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prefix-router"
PROMPT = list(range(1, 49))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from index import EngineIndex

    return EngineIndex()


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> Any:
    base = {"block_hashes": hashes, "token_ids": tokens, "block_size": 16, "parent_block_hash": parent}
    return SimpleNamespace(**{**base, "group_idx": 0, "extra_keys": None, "lora_name": None, **more})


def removed(*hashes: int) -> Any:
    return SimpleNamespace(block_hashes=list(hashes), group_idx=0)


def test_the_longest_prefix_counts_and_a_gap_ends_it(index: Any) -> None:
    index.stored(stored([1, 2], PROMPT[:32]))
    index.stored(stored([3], PROMPT[32:], parent=2))
    assert index.cached_tokens(PROMPT) == 48
    assert index.cached_tokens([*PROMPT[:40], 0, 0]) == 32
    assert index.cached_tokens([0, *PROMPT]) == 0
    index.removed(removed(2))
    assert index.cached_tokens(PROMPT) == 16


def test_a_block_in_two_places_stays_until_it_has_left_both(index: Any) -> None:
    for _ in range(2):
        index.stored(stored([1], PROMPT[:16]))
    index.removed(removed(1))
    assert index.cached_tokens(PROMPT) == 16
    index.removed(removed(1))
    index.removed(removed(1))
    assert index.cached_tokens(PROMPT) == 0
    assert len(index) == 0


def test_what_cannot_be_placed_is_left_out(index: Any) -> None:
    index.stored(stored([2], PROMPT[16:32], parent=1))  # its parent was never seen
    index.stored(stored([3], PROMPT[:16], lora_name="adapter"))
    index.stored(stored([4], PROMPT[:16], extra_keys=[["salt"]]))
    assert len(index) == 0


def test_a_prompt_under_way_counts_as_there(index: Any) -> None:
    index.stored(stored([9], [5] * 16))
    index.coming(PROMPT, 1)
    index.coming(PROMPT[:16], 1)
    assert index.cached_tokens(PROMPT) == 48
    index.coming(PROMPT, -1)
    assert index.cached_tokens(PROMPT) == 16
    index.coming(PROMPT[:16], -1)
    assert index.cached_tokens(PROMPT) == 0


@pytest.fixture
def publisher() -> Iterator[Callable[..., Any]]:
    """Makes vLLM's own publisher at these addresses."""
    import zmq
    from vllm.distributed.kv_events import ZmqEventPublisher

    made: list[Any] = []

    def make(events: str, replay: str) -> Any:
        deadline = time.monotonic() + 20
        while True:
            try:
                made.append(ZmqEventPublisher(0, endpoint=events, replay_endpoint=replay))
                return made[-1]
            except zmq.ZMQError:  # a socket that was closed leaves its address a moment later
                assert time.monotonic() < deadline
                time.sleep(0.1)

    yield make
    for one in made:
        one.shutdown()


def test_a_stream_catches_up_and_forgets_a_former_engine(index: Any, publisher: Any, tmp_path: Path) -> None:
    from streams import Stream
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    def publish(stream: Any, event: Any) -> None:
        stream.publish(KVEventBatch(ts=time.time(), events=[event]))

    def block(number: int) -> Any:
        at = 16 * number
        parent = number if number else None
        return BlockStored([number + 1], parent, PROMPT[at : at + 16], 16, None, "CPU", None, group_idx=0)

    async def until(tokens: int) -> None:
        deadline = time.monotonic() + 20
        while index.cached_tokens(PROMPT) != tokens:
            assert time.monotonic() < deadline, index.cached_tokens(PROMPT)
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        # vLLM binds what has a wildcard and connects elsewhere
        first = publisher(events.replace("127.0.0.1", "*"), replay)
        publish(first, block(0))
        reading = asyncio.create_task(Stream(events, replay, index).run())
        await until(16)  # told before anybody listened
        publish(first, block(1))
        publish(first, block(2))
        await until(48)
        publish(first, BlockRemoved([3], "CPU", 0))
        await until(32)
        first.shutdown()
        second = publisher(events.replace("127.0.0.1", "*"), replay)
        deadline = time.monotonic() + 20
        while index.cached_tokens(PROMPT):  # a subscriber needs a moment to find the new one
            assert time.monotonic() < deadline
            publish(second, BlockRemoved([77], "CPU", 0))
            await asyncio.sleep(0.1)
        reading.cancel()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routing_by_prefix_beats_taking_turns(models: Path, tmp_path: Path) -> None:
    small = ["--documents", "6", "--questions", "5"]
    command = [sys.executable, EXAMPLE / "run.py", "--model", models / "tiny", "--out", tmp_path, *small]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["prefix"]["hit_rate"] > result["round-robin"]["hit_rate"]
    assert sum(result["prefix"]["requests"]) == 30
    assert min(result["prefix"]["requests"]) > 0
