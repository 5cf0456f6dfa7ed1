"""Loads beside the steps: what is void, and threads that cannot start."""

import threading
import time
from typing import Any

import pytest
from test_vllm_layerwise import Worker, load_of, worker

from kvcore_vllm.metadata import Metadata

__all__ = ["worker"]
pytestmark = pytest.mark.vllm


def step(worker: Worker, meta: Metadata) -> set[str]:
    """The requests whose loads have ended."""
    meta.arena, meta.attach = "a", worker.attach
    worker.half.begin(meta)
    worker.half.load(meta, None)
    worker.half.save(meta)
    return set(worker.half.results(meta)[1])


def ended(worker: Worker, meta: Metadata) -> tuple[set[int], dict[int, bool]]:
    """The blocks that have failed and the loads' reports, once the request's load has ended."""
    until = time.monotonic() + 10
    while not step(worker, meta):
        assert time.monotonic() < until
        meta = Metadata()
    return worker.half.bad_blocks(), worker.reports()["loads"]


def test_a_load_that_is_void_has_failed_whatever_was_copied(worker: Worker) -> None:
    load = load_of(worker)._replace(beside=True)
    step(worker, Metadata(loads=[load._replace(last=False)]))
    step(worker, Metadata(void=[5]))
    assert ended(worker, Metadata(loads=[load._replace(first=False)])) == ({1, 2}, {5: False})
    assert ended(worker, Metadata(loads=[load])) == (set(), {5: True})  # nothing stays void


@pytest.mark.parametrize("last", [True, False])
def test_a_copy_thread_that_cannot_start_is_a_failed_part(
    worker: Worker, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    load = load_of(worker)._replace(beside=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        done = step(worker, Metadata(loads=[load._replace(last=last)]))
    if last:
        assert done == {"r"}
        assert (worker.half.bad_blocks(), worker.reports()["loads"]) == ({1, 2}, {5: False})
    else:  # there is room again, and the rest is copied
        rest = load._replace(copies=(), blocks=frozenset(), first=False)
        assert ended(worker, Metadata(loads=[rest])) == ({1, 2}, {5: False})
    assert ended(worker, Metadata(loads=[load])) == (set(), {5: True})
