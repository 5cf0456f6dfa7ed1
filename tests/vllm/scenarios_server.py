"""Scenarios with `kvcore serve`: engines that share it, engines and servers that are killed, frozen, late."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Engine, crowd, engine, fork_ranks, tokens
from peers import Peer
from scenarios_basic import ASYNC, LONG, PROMPTS
from scenarios_pd import hand_over

from kvcore.testing.servers.kvcore import KVCoreServer

OTHER = tokens(70, 900)
BACK_S = 10.0


@contextmanager
def server(**config: Any) -> Iterator[KVCoreServer]:
    """A server, not started."""
    with tempfile.TemporaryDirectory() as folder:
        made = KVCoreServer(Path(folder), {"l1": {"size": "256MiB"}, "l2": [], **config})
        try:
            yield made
        finally:
            made.stop()


def of(served: KVCoreServer, **more: Any) -> dict[str, Any]:
    """Options of an engine that uses it."""
    return {"kvcore.server": served.url, **more}


def two_engines(models: Path) -> dict[str, Any]:
    """What one process computed another reuses; then the one is killed in the middle of a store."""
    out: dict[str, Any] = {}
    model = str(models / "tiny")
    with server() as served, served, Peer(model, of(served)) as other, engine(model, of(served)) as e:
        other.answer()
        out["first"] = other.call("run", [LONG, *PROMPTS], 16)["texts"]
        out["second"], out["second_cached"] = e.run([LONG, *PROMPTS])
        out["counted"] = e.stat('kvcore_hit_chunks_total{source="l1"')
        out["unasked"] = e.answered
        e.one(LONG, transfer={"do_remote_decode": True})
        out["asked"] = e.answered
        other.call("die_saving")
        other.ask("run", [OTHER], 16)
        out["meanwhile"], _ = e.run(PROMPTS)
        out["ended_with"] = other.process.wait(60)
        out["survivor"], out["survivor_cached"] = e.one(OTHER)
        e.forget()
        out["again"], out["again_cached"] = e.one(OTHER)
        e.settle()
        out["held"], out["faults"] = served_leaks(served), e.faults()
    return out


def two_models(models: Path) -> dict[str, Any]:
    """Engines of different models share a server; both are asked the same tokens."""
    out: dict[str, Any] = {}
    for model in ("tiny", "swa"):
        with engine(str(models / model), None) as e:
            out[f"{model}_plain"], _ = e.run(PROMPTS)
    with server() as served, served:
        with Peer(str(models / "swa"), of(served)) as other, engine(str(models / "tiny"), of(served)) as e:
            other.answer()
            other.ask("run", PROMPTS, 16)
            out["tiny"], out["tiny_cached"] = e.run(PROMPTS)
            out["swa"] = other.answer()["texts"]
            other.call("settle")
            e.settle()
            e.forget()
            out["tiny_hot"], out["tiny_hot_cached"] = e.run(PROMPTS)
        with engine(str(models / "swa"), of(served)) as e:
            out["swa_hot"], out["swa_hot_cached"] = e.run(PROMPTS)
            e.settle()
            out["faults"] = e.faults()
        out["held"] = served_leaks(served)
    return out


def comes_and_goes(models: Path) -> dict[str, Any]:
    """A server that is started after the engine, killed in the middle of requests, started again, frozen and thawed."""
    out: dict[str, Any] = {}
    prompts = crowd(24)
    model = str(models / "tiny")
    with engine(model, None) as e:
        out["plain"], _ = e.run(prompts)
    with server() as served, engine(model, of(served)) as e:
        out["without"], out["without_cached"] = e.run([LONG, *PROMPTS])
        served.start()
        _wait_for(e, there=True)
        out.update(_reuse(e, "late"))
        e.run(prompts)
        e.forget()
        _kill_at(e, served, 3)
        out["dying"], _ = e.run(prompts)
        _wait_for(e, there=False)
        until = time.monotonic() + 5
        while _mapped() and time.monotonic() < until:  # without a step: the memory is the next server's
            time.sleep(0.01)
        out["mapped_while_dead"] = _mapped()
        out["dead"], out["dead_cached"] = _run(e, [LONG, *PROMPTS])
        served.start()
        _wait_for(e, there=True)
        out.update(_reuse(e, "back"))
        served.freeze()
        seconds = e.half.seconds
        out["frozen"], out["frozen_cached"] = _run(e, [LONG, *PROMPTS])
        out["frozen_s"] = e.half.seconds - seconds
        served.thaw()
        _wait_for(e, there=True)
        out["thawed"], out["thawed_cached"] = _run(e, [LONG, *PROMPTS])
        e.settle()
        out["mapped"] = _mapped()
        out["held"], out["faults"] = served_leaks(served), e.faults()
        out["requests"] = len(e.half._requests) + len(e.half._waiting) + len(e.half._load_plans)
    return out


def windows(models: Path) -> dict[str, Any]:
    """A model with sliding windows, whose loads and saves run beside the steps, and few blocks: reuse, and a server
    that is killed with copies under way."""
    out: dict[str, Any] = {}
    prompts = crowd(16)
    model = str(models / "swa")
    with engine(model, None) as e:
        out["plain"], _ = e.run([LONG, *PROMPTS])
        out["plain_crowd"], _ = e.run(prompts)
    with server() as served, served, engine(model, of(served, **ASYNC), num_gpu_blocks_override=40) as e:
        _wait_for(e, there=True)
        out.update(_reuse(e, "served"))
        _run(e, prompts)
        e.forget()
        _kill_at(e, served, 2)
        out["dying"], _ = e.run(prompts)
        e.settle()
        out["requests"] = len(e.half._requests) + len(e.half._waiting) + len(e.half._load_plans)
        out["faults"] = e.faults()
    return out


def _kill_at(e: Engine, served: KVCoreServer, nth: int) -> None:
    """SIGKILL after so many loads were planned: with copies to make, leases held and lookups to come."""
    cache, asked = e.half.engine, 0
    retrieve = cache.retrieve

    def retrieve_and_kill(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        copies = retrieve(*args)
        if asked == nth:
            del cache.retrieve
            served.kill()
        return copies

    cache.retrieve = retrieve_and_kill


def tenants(models: Path) -> dict[str, Any]:
    """Whose request it is decides what it can reuse."""
    out: dict[str, Any] = {}
    with server() as served, served, engine(str(models / "tiny"), of(served)) as e:
        _wait_for(e, there=True)
        for name, transfer, salt in (
            ("a", {"tenant": "a"}, None),
            ("a_again", {"tenant": "a"}, None),
            ("a_salted", {"tenant": "a"}, "salt"),
            ("b", {"tenant": "b"}, None),
            ("salt", None, "b"),
            ("nobody", None, None),
            ("wrong", {"tenant": "x" * 1000}, None),
            ("wrong_again", {"tenant": "x" * 1000}, None),
        ):
            e.forget()
            (out[name],), (out[f"{name}_cached"],) = e.run([LONG], transfer=transfer, salt=salt)
        out["refused"] = e.stat("kvcore_refused_tenants_total")
        out["faults"] = e.faults()
    return out


def over_a_server(models: Path) -> dict[str, Any]:
    """Prefill and decode over one server."""
    with server() as served, served:
        return hand_over(str(models / "tiny"), of(served), of(served))


def tensor_parallel(models: Path) -> dict[str, Any]:
    """Two ranks in processes of their own, without kvcore, with a cache of their engine's, and with a server's."""
    out: dict[str, Any] = {}
    fork_ranks()
    made = Engine(str(models / "tiny"), None, tensor_parallel_size=2)
    out["plain"] = made.run(PROMPTS)[0]
    made.close()
    with server() as served, served:
        for name, extra in (("own", ASYNC), ("served", {**ASYNC, **of(served)})):
            made = Engine(str(models / "tiny"), extra, tensor_parallel_size=2)
            out[f"{name}_cold"] = made.run(PROMPTS)[0]
            made.forget()
            out[f"{name}_hot"], out[f"{name}_cached"] = made.run(PROMPTS)
            made.close()
        out["held"] = served_leaks(served)
    return out


def served_leaks(served: KVCoreServer) -> dict[str, float]:
    """What the server still holds for requests; all zero when none runs."""
    until = time.monotonic() + 5
    while True:
        metrics = served.metrics()
        held = {"leases": metrics["kvcore_leases"], "quarantined": metrics['kvcore_l1_bytes{state="quarantined"}']}
        if not any(held.values()) or time.monotonic() > until:
            return held
        time.sleep(0.05)  # releases are told, not asked


def _reuse(e: Engine, name: str) -> dict[str, Any]:
    """Store, and reuse."""
    out: dict[str, Any] = {}
    out[name], _ = _run(e, [LONG, *PROMPTS])
    out[f"{name}_hot"], out[f"{name}_cached"] = _run(e, [LONG, *PROMPTS])
    return out


def _run(e: Engine, prompts: list[Any]) -> Any:
    e.forget()
    return e.run(prompts)


def _wait_for(e: Engine, *, there: bool) -> None:
    until = time.monotonic() + BACK_S
    while (e.half.engine.descriptor() is not None) != there:
        assert time.monotonic() < until, f"no {'connection' if there else 'end of it'} within {BACK_S:g} s"
        time.sleep(0.01)


def _mapped() -> int:
    """Arenas that this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "kvcore-arena" in line}) if os.path.exists("/proc/self") else 0
