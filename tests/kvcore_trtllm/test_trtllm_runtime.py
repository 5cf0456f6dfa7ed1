"""The connector under a stand-in for TensorRT-LLM that keeps to the documented call order and fails on a broken rule.

This is not TensorRT-LLM: the connector is interface-tested only.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtllm_runtime import Replace, Runtime, Start, arguments, prompt, saved, warm

from kvcore.api import ConfigError, LayoutError
from kvcore.explain.explain import explain_prompt
from kvcore.explain.models import Question
from kvcore.testing.servers.kvcore import KVCoreServer
from kvcore_trtllm.connector import KVCoreScheduler
from kvcore_trtllm.reports import Outbox, Report
from kvcore_trtllm.worker import WorkerHalf


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("context", [10_000, 24], ids=["whole", "chunked"])
def test_a_prefix_is_loaded_on_all_ranks(start: Start, ranks: int, context: int) -> None:
    engine = start(ranks, context=context)
    assert engine.run(prompt(70)).matched == 0
    saved(engine)
    assert engine.run(prompt(70)).matched == 64
    assert engine.run(prompt(50) + prompt(30, seed=1)).matched == 48
    assert engine.run(prompt(64)).matched == 56, "a token is left to compute, in whole blocks"
    assert engine.run([1, *prompt(70)[1:]]).matched == 0


def test_a_prompt_is_explained_by_its_tokens(start: Start) -> None:
    engine = start()
    engine.run(prompt(70))
    saved(engine)
    cache = engine.scheduler.half.engine
    (said,) = explain_prompt(cache, Question(tokens=prompt(70))).explanations
    assert said.found.chunks == said.chunks > 0
    (said,) = explain_prompt(cache, Question(tokens=[1, *prompt(70)[1:]])).explanations
    assert said.found.chunks == 0


def test_generated_tokens_are_kept_for_the_next_turn(start: Start) -> None:
    engine = start()
    first = engine.run(prompt(40), count=30)
    saved(engine)
    assert engine.run([*first.tokens, *prompt(5, seed=2)]).matched == 64


def test_what_the_engine_holds_itself_is_not_loaded(start: Start) -> None:
    engine = start()
    engine.run(prompt(100))
    saved(engine)
    assert engine.run(prompt(100), held=40).matched == 96 - 40
    assert engine.run(prompt(100), held=96).matched == 0
    assert engine.run(prompt(100), held=43).matched == 0, "a block of which the engine holds a part"


def test_many_requests_at_once(start: Start) -> None:
    engine = start(2, blocks=512)
    texts = [prompt(60) + prompt(20, seed=s) for s in range(3)] + [prompt(90, seed=9)]
    for _ in range(3):
        running = [engine.submit(text, 6) for text in texts]
        engine.until(lambda: all(r.state == "freed" for r in running))  # noqa: B023
        saved(engine)
    assert [r.matched for r in running] == [72, 72, 72, 80]


def test_after_a_restart_it_comes_from_disk(start: Start, tmp_path: Path) -> None:
    l2 = f"[{{storage: {{plugin: disk, path: {tmp_path}/disk}}}}]"
    engine = start(2, l2=l2)
    engine.run(prompt(70))
    saved(engine)
    engine.close()
    again = start(2, l2=l2)
    assert again.run(prompt(70)).matched == 64
    assert again.run(prompt(70)).matched == 64


def test_the_first_request_is_computed_until_the_ranks_have_the_arena(start: Start) -> None:
    engine = start(2, ready=False)
    request = engine.run(prompt(70))
    assert request.matched == 0


def test_a_request_that_ends_while_its_kv_is_loaded(start: Start, replace: Replace) -> None:
    hold = threading.Event()
    hold.set()

    def slow(half: WorkerHalf, job: Any, copy: Callable[[], bool]) -> bool:
        return hold.wait(60) and copy()

    replace("load", slow)
    engine = start(2)
    engine.run(prompt(70))
    saved(engine)
    hold.clear()
    request = engine.submit(prompt(70))
    engine.step()
    assert request.state == "loading"
    engine.cancel(request)
    for _ in range(20):
        engine.step()
    assert request.state == "saving", "its blocks are being written: they cannot be freed"
    hold.set()
    engine.until(lambda: request.state == "freed")
    saved(engine)
    assert engine.run(prompt(70)).matched == 64, "its leases are gone"


def test_a_request_that_ends_before_its_load_was_sent(start: Start) -> None:
    engine = start()
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70))
    request.blocks, request.state = list(range(9)), "loading"
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (64, True)
    engine.scheduler.update_state_after_alloc(request, request.blocks)
    assert engine.scheduler.request_finished(request, request.blocks), "the runtime counts on it as loading"
    assert not engine.scheduler.half._loads
    assert not engine.scheduler.half._loading
    assert engine.workers[0].get_finished([request.request_id], [request.request_id]) == (
        [request.request_id],
        [request.request_id],
    )
    request.state = "freed"


def test_blocks_stay_until_they_are_saved_on_every_rank(start: Start, replace: Replace) -> None:
    hold = threading.Event()

    def slow(half: WorkerHalf, job: Any, copy: Callable[[], bool]) -> bool:
        return (half._rank == 0 or hold.wait(60)) and copy()

    replace("save", slow)
    engine = start(2)
    request = engine.submit(prompt(70))
    engine.until(lambda: request.state == "saving")
    for _ in range(20):
        engine.step()
    assert request.state == "saving"
    assert engine.scheduler.half._saving, "rank 1 has not reported: nothing is published"
    hold.set()
    engine.until(lambda: request.state == "freed")
    saved(engine)
    assert engine.run(prompt(70)).matched == 64


def test_a_save_that_fails_on_one_rank_is_not_published(start: Start, replace: Replace) -> None:
    broken = [True]
    replace("save", lambda half, job, copy: (half._rank == 0 or not broken[0]) and copy())
    engine = start(2)
    engine.run(prompt(70))
    saved(engine)
    broken[0] = False
    assert engine.run(prompt(70)).matched == 0
    saved(engine)
    assert engine.run(prompt(70)).matched == 64


def test_a_load_that_fails_is_tried_again_and_never_called_loaded(
    start: Start, replace: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [2]

    def fails(half: WorkerHalf, job: Any, copy: Callable[[], bool]) -> bool:
        if half._rank == 1 and failures[0]:
            failures[0] -= 1
            return False
        return copy()

    replace("load", fails)
    monkeypatch.setattr("kvcore_trtllm.copier.AGAIN_S", 0.05)
    engine = start(2)
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70))
    engine.until(lambda: request.state == "freed")
    assert (request.matched, failures) == (64, [0])


def test_a_request_whose_load_cannot_succeed_waits_until_it_is_cancelled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.run(prompt(70))
    saved(engine)
    monkeypatch.setattr("kvcore_trtllm.copier.AGAIN_S", 0.01)
    monkeypatch.setattr("kvcore.transfer.PagedCache.load", lambda *_: {0})
    request = engine.submit(prompt(70))
    other = engine.run(prompt(30, seed=4))
    assert other.state == "freed", "the others go on"
    assert request.state == "loading"
    engine.cancel(request)
    engine.until(lambda: request.state == "freed")


def test_salts_and_requests_that_depend_on_more_than_tokens(start: Start) -> None:
    engine = start()
    engine.run(prompt(70), cache_salt="a")
    saved(engine)
    assert engine.run(prompt(70), cache_salt="b").matched == 0
    assert engine.run(prompt(70)).matched == 0
    assert engine.run(prompt(70), cache_salt="a").matched == 64
    generation = engine.submit(prompt(70), cache_salt="a", is_generation_only_request=True)
    assert engine.scheduler.get_num_new_matched_tokens(generation, 0) == (0, False)
    generation.state = "freed"


def test_a_small_cache_evicts_and_never_misleads(start: Start) -> None:
    engine = start(blocks=256)
    engine.scheduler.half.engine.close()
    for seed in range(4):
        assert engine.run(prompt(70, seed)).matched == 0, "a closed cache is only misses"


# -- over a server ---------------------------------------------------------------------------------------------------


def test_two_engines_share_a_server(start: Start, server: KVCoreServer) -> None:
    first, second = (start(2, config=str(server.config)) for _ in range(2))
    first.run(prompt(70))
    saved(first)
    assert second.run(prompt(70)).matched == 64


def test_a_server_that_is_killed_costs_nothing_but_the_cache(start: Start, server: KVCoreServer) -> None:
    engine = start(2, config=str(server.config))
    engine.run(prompt(70))
    saved(engine)
    request = engine.submit(prompt(70))
    asked = engine.scheduler.update_state_after_alloc

    def killed(*arguments: Any) -> None:  # after the promise, before the plan is sent
        server.kill()
        asked(*arguments)

    engine.scheduler.update_state_after_alloc = killed
    engine.until(lambda: request.state == "freed")
    engine.scheduler.update_state_after_alloc = asked
    assert request.matched == 64, "what was promised is still mapped"
    assert engine.run(prompt(70)).matched == 0
    server.start()
    engine.until(lambda: engine.scheduler.half.engine.descriptor() is not None)
    warm(engine)
    for _ in range(2):
        last = engine.run(prompt(70))
        saved(engine)
    assert last.matched == 64


def test_a_server_that_is_not_there(start: Start, server: KVCoreServer) -> None:
    server.stop()
    engine = start(config=str(server.config), ready=False)
    assert engine.run(prompt(70)).matched == 0


# -- at the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"speculative_config": object()}, "speculative_config is set"),
        ({"enable_attention_dp": True}, "enable_attention_dp is set"),
        ({"tensor_parallel_size": 16, "gpus_per_node": 8}, "16 ranks on nodes of 8 GPUs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    args = arguments()
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(LayoutError, match=reason):
        KVCoreScheduler(args)


def test_a_wrong_configuration_is_the_users_to_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvcore.yaml").write_text("l1: {siez: 1GiB}\n")
    monkeypatch.setenv("KVCORE_CONFIG", str(tmp_path / "kvcore.yaml"))
    with pytest.raises(ConfigError, match="siez"):
        KVCoreScheduler(arguments())


def test_nothing_is_left_behind(start: Start) -> None:
    engine = start()
    folder = os.path.dirname(engine.scheduler.half._inbox.address)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    engine.close()
    engine.close()
    assert not os.path.exists(folder)


@pytest.mark.parametrize("kind", ["attached", "loaded", "saved"])
def test_a_report_that_cannot_be_sent_is_told_with_the_next(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Else the scheduler would keep what it is about, and renew its lease, for ever."""
    refused: list[Report] = []
    send = Outbox.send

    def refuse(outbox: Outbox, report: Report) -> None:
        if report.kind == kind and not refused:
            refused.append(report)
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        send(outbox, report)

    monkeypatch.setattr(Outbox, "send", refuse)
    engine = start()
    for matched in (0, 64):
        for seed in (0, 1):
            assert engine.run(prompt(70, seed)).matched == matched
        saved(engine)
    assert len(refused) == 1
    _one_report_failed(engine)


def test_a_rank_that_cannot_report_yet_loads_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests wait for that."""
    engine = start()
    engine.run(prompt(70))
    saved(engine)
    half = engine.workers[0].half
    assert half._outbox is not None
    half._outbox.close()
    half._outbox = None
    made = Outbox.__init__

    def refuse(outbox: Outbox, address: str) -> None:
        monkeypatch.setattr(Outbox, "__init__", made)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Outbox, "__init__", refuse)
    assert engine.run(prompt(70)).matched == 64
    engine.run(prompt(70, seed=1))  # whose reports bring the others
    saved(engine)
    _one_report_failed(engine)


def _one_report_failed(engine: Runtime) -> None:
    assert engine.faults() == {"report:OSError": 1}
    engine.workers[0].half.faults.clear()
