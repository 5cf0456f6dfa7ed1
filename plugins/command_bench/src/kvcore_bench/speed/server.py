"""A `kvcore serve` process as engines see it: lookups of 128 hits, copies through its arena, what it takes by itself.

A lookup is asked, answered and released. Its limit is the same bytes to a process that only answers, over the same kind
of socket. With more objects or clients, the limit is the same lookup with few: a ratio of 1 is a cost that does not
grow. `lookup_N` asks for the same eight prompts among N objects, `lookup_N_any` for any of them: objects that the
processor's caches have not kept cost more in any table.
"""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from kvcore.service import wire
from kvcore_bench.speed import echo_end
from kvcore_bench.speed.machine import available_bytes
from kvcore_bench.speed.measure import Case, absent, measure, rate
from kvcore_bench.speed.rows import Row, Unit
from kvcore_bench.speed.served import CHUNKS, Askers, Served, look_up, model
from kvcore_bench.speed.setting import Setting

POPULATIONS = {"1k": 1_000, "10k": 10_000, "100k": 100_000, "1m": 1_000_000}
BYTES_PER_OBJECT = 4096 + 2048
"""What a small object takes at most: its slot, and its place in the tables of the server and of this process."""
COPIES: tuple[tuple[str, Unit], ...] = (("server.store", "GB/s"), ("server.retrieve", "GB/s"))
_HOT = 8


def run(setting: Setting) -> list[Row]:
    """The rows `server.*`."""
    return [*_by_itself(setting), *_clients(setting), *_objects(setting), *_copies(setting)]


# -- by itself ---------------------------------------------------------------------------------------------------------


def _by_itself(setting: Setting) -> list[Row]:
    idle_s = 1.5 if setting.quick else 10.0
    rows = measure([Case("server.ready", "s", _ready, _process)], 3 if setting.quick else 5)
    with Served(100_000 + CHUNKS) as served:
        served.settled()
        time.sleep(1.2)  # what a start leaves to be done has been
        before = served.cpu_ms()
        time.sleep(idle_s)
        idle_ms = (served.cpu_ms() - before) / idle_s * 10
        empty = served.rss_mib()
        served.fill(100_000)
        rows += [
            Row("server.idle_cpu", idle_ms, "ms", note=f"idle_cpu: of ten seconds, from {idle_s:g}"),
            Row("server.rss", empty, "MiB"),
            Row("server.rss_100k", served.rss_mib(), "MiB"),
        ]
    return rows


def _ready() -> float:
    with Served(64) as served:
        return served.ready_s


def _process() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import kvcore.service.server"], check=True)
    return time.perf_counter() - begun


# -- lookups against clients -------------------------------------------------------------------------------------------


def _clients(setting: Setting) -> list[Row]:
    calls, seconds = (200, 0.3) if setting.quick else (1000, 1.0)
    with ExitStack() as stack:
        served = stack.enter_context(Served(4096)).settled()
        prompts = served.fill(_HOT * CHUNKS)
        echo = stack.enter_context(_echo())
        asking = partial(_times, partial(look_up, served.engine, served.space), prompts, calls)
        waiting = _Quantiles(asking)
        answering = _Quantiles(partial(_times, lambda _: echo(), prompts, calls))
        few, eight, many = (stack.enter_context(closing(Askers(served, prompts, 2, n))) for n in (1, 4, 32))
        other = stack.enter_context(closing(Askers(served, prompts, 1, 1)))
        beside = _Quantiles(partial(_beside, other, seconds, partial(look_up, served.engine, served.space), prompts))
        return measure(
            [
                Case("server.lookup_p50", "ms", waiting.p50, answering.p50),
                Case("server.lookup_p99", "ms", waiting.last_p99, answering.last_p99),
                Case(
                    "server.lookup_tail",
                    "ms",
                    beside.p99,
                    beside.last_p50,
                    note="lookup_tail: the 99th percentile while another process asks, too; limit: the median",
                ),
                Case("server.lookups", "1/s", partial(few.rate, seconds), note="lookups: of two client processes"),
                Case(
                    "server.lookup_cpu",
                    "ms",
                    lambda: _cpu(served, few, seconds),
                    note="lookup_cpu: what a lookup takes of the server",
                ),
                Case("server.lookups_8", "1/s", partial(eight.rate, seconds), partial(few.rate, seconds)),
                Case("server.lookups_64", "1/s", partial(many.rate, seconds), partial(few.rate, seconds)),
            ],
            3 if setting.quick else 7,
        )


def _cpu(served: Served, askers: Askers, seconds: float) -> float:
    """Milliseconds of the server's CPU time for each lookup: what many clients can ask for is bounded by it."""
    before = served.cpu_ms()
    lookups = askers.rate(seconds) * seconds
    return (served.cpu_ms() - before) / lookups


class _Quantiles:
    """The median of a sample of times, and the 99th percentile of the same sample, in ms."""

    def __init__(self, take: Callable[[], list[float]]) -> None:
        self._take = take
        self._times: list[float] = []

    def p50(self) -> float:
        self._times = sorted(self._take())
        return self.last_p50()

    def p99(self) -> float:
        self._times = sorted(self._take())
        return self.last_p99()

    def last_p50(self) -> float:
        return self._times[len(self._times) // 2]

    def last_p99(self) -> float:
        return self._times[len(self._times) * 99 // 100]


def _times(call: Callable[[Sequence[bytes]], object], prompts: Sequence[Sequence[bytes]], calls: int) -> list[float]:
    """Milliseconds of each of so many calls."""
    times = []
    clock = time.perf_counter_ns
    for i in range(calls):
        prompt = prompts[i % len(prompts)]
        begun = clock()
        call(prompt)
        times.append((clock() - begun) / 1e6)
    return times


def _beside(
    other: Askers, seconds: float, call: Callable[[Sequence[bytes]], object], prompts: Sequence[Sequence[bytes]]
) -> list[float]:
    """The same for so long, while `other` asks, too."""
    thread = threading.Thread(target=other.rate, args=(seconds,))
    thread.start()
    times: list[float] = []
    while thread.is_alive():
        times += _times(call, prompts, len(prompts))
    thread.join()
    return times


@contextmanager
def _echo() -> Iterator[Callable[[], object]]:
    """A call that has as many bytes as a lookup answered by a process that does nothing else."""
    near, far = socket.socketpair()
    with near, far:
        slots = wire.Slots(b"", bytes(8 * CHUNKS), bytes(8 * CHUNKS))
        asked = bytes(wire.frame(wire.Find(1000, 1, 32, bytes(32 * CHUNKS))))
        room = memoryview(wire.frame(wire.Found(1000, CHUNKS, True, {"l1": CHUNKS}, {}, [slots])))
        words = [sys.executable, echo_end.__file__, str(far.fileno()), str(len(asked)), str(len(room))]
        process = subprocess.Popen(words, pass_fds=[far.fileno()], start_new_session=True)
        far.close()
        try:
            yield lambda: echo_end.ask(near, asked, room)
        finally:
            near.close()
            process.wait()


# -- lookups against objects -------------------------------------------------------------------------------------------


def _objects(setting: Setting) -> list[Row]:
    calls = 200 if setting.quick else 500
    sizes = [name for name in POPULATIONS if not (setting.quick and name in ("10k", "1m"))]
    rows, cases = [], []
    with ExitStack() as stack:
        asks: dict[str, Callable[[], float]] = {}
        for name in sizes:
            objects = POPULATIONS[name]
            if available_bytes() < objects * BYTES_PER_OBJECT * 5 // 4:
                kinds: tuple[tuple[str, Unit], ...] = (
                    (f"server.lookup_{name}", "ms"),
                    (f"server.lookup_{name}_any", "ms"),
                )
                rows += absent(kinds, f"too little memory is available for {name} objects")
                continue
            served = stack.enter_context(Served(objects + 4 * CHUNKS)).settled()
            prompts = served.fill(max(objects, CHUNKS * _HOT))
            call = partial(look_up, served.engine, served.space)
            any_of = random.Random(1).choices(prompts, k=max(calls, 2000))  # noqa: S311 - test data
            asks[name] = partial(_median, call, prompts[:_HOT], calls)
            asks[f"{name}_any"] = partial(_median, call, any_of, calls)
        for name, ask in asks.items():
            if not name.startswith("1k"):
                cases.append(Case(f"server.lookup_{name}", "ms", ask, asks["1k"]))
        return measure(cases, 3 if setting.quick else 7) + rows


def _median(call: Callable[[Sequence[bytes]], object], prompts: Sequence[Sequence[bytes]], calls: int) -> float:
    return sorted(_times(call, prompts, calls))[calls // 2]


# -- copies ------------------------------------------------------------------------------------------------------------


def _copies(setting: Setting) -> list[Row]:
    from kvcore_bench.speed import transfer

    if find_spec("torch") is None:
        return absent(COPIES, "torch is not installed (the engine brings it, or kvcore[torch])")
    import torch

    chunks = min(6 if setting.quick else 24, available_bytes() // (8 * transfer.OBJECT_BYTES))
    if chunks < 1:
        return absent(COPIES, "too little memory is available")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with closing(_Worker(torch, chunks)) as worker:
            nbytes = chunks * transfer.OBJECT_BYTES
            plain = transfer.plain_copy(torch, nbytes)
            rows = measure(
                [
                    Case(
                        "server.store",
                        "GB/s",
                        rate(worker.store, nbytes, repeats=2, before=worker.clear),
                        rate(plain, nbytes, repeats=2),
                    ),
                    Case(
                        "server.retrieve",
                        "GB/s",
                        rate(worker.retrieve, nbytes, repeats=2),
                        rate(plain, nbytes, repeats=2),
                    ),
                ],
                3 if setting.quick else 7,
            )
            worker.check()
        return rows
    finally:
        torch.set_num_threads(threads)


class _Worker:
    """An engine and its worker in one: paged KV, and the arena of the server."""

    def __init__(self, torch: Any, chunks: int) -> None:
        from kvcore.engine import attach_arena
        from kvcore.transfer import PagedCache
        from kvcore_bench.speed import transfer

        spec = model(transfer.BLOCK_BYTES, transfer.LAYERS)
        self._served = Served(chunks + 1, transfer.OBJECT_BYTES, spec, transfer.CHUNK_TOKENS).settled()
        self._engine, self._space = self._served.engine, self._served.space
        self._view = attach_arena(self._engine.descriptor())
        self._kv = transfer.TwoSides(torch, chunks, split=False)
        self._from = PagedCache([self._kv.source], self._space.groups, 0, self._view)
        self._into = PagedCache([self._kv.target], self._space.groups, 0, self._view)
        self._hashes = [random.Random(i).randbytes(32) for i in range(chunks)]  # noqa: S311 - test data

    def clear(self) -> None:
        self._engine.clear(self._space)

    def store(self) -> None:
        plan = self._engine.reserve(self._space, self._hashes, 0, len(self._hashes), [self._kv.ids])
        if len(plan.copies) != len(self._hashes):
            raise AssertionError(f"a chunk found no room: {plan.skipped}")
        self._from.store(plan.copies)
        self._engine.publish(plan.id)

    def retrieve(self) -> None:
        lookup = self._engine.lookup(self._space, self._hashes)
        if lookup.poll() != len(self._hashes):
            raise AssertionError(f"a stored chunk was not found: {lookup.misses}")
        if self._into.load(self._engine.retrieve(lookup, 0, [self._kv.ids])):
            raise AssertionError("a load failed")
        self._engine.release(lookup)

    def check(self) -> None:
        self._kv.check()

    def close(self) -> None:
        del self._from, self._into
        self._view.close()
        self._served.close()
