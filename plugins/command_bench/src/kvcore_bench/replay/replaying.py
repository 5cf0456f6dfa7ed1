"""The requests of a trace, one after the other, through an engine."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.api import ConfigError, LeaseError
from kvcore.cli.kit.progress import Progress
from kvcore.engine import Asked, Engine, GroupSpec, ModelSpec, Space
from kvcore.engine.copying import copy_in, copy_out
from kvcore.service.attachment import Attachment
from kvcore.transfer.plan import Copy
from kvcore_bench.simulate.trace import Trace

LATE_S = 0.01
"""A request that begins so much after its time is late."""
MAX_S = 365 * 86400.0
_MARK = 8


def model(name: str, block_tokens: int, bytes_per_token: int) -> ModelSpec:
    """A model that nobody has, of one layer. What is stored under another `name` is not found."""
    group = GroupSpec(("kv",), (block_tokens * bytes_per_token,))
    return ModelSpec(
        engine="replay", model="replay", weights=name, dtype="uint8", element_bytes=1, layout="replay",
        backend="replay", isa="replay", block_tokens=block_tokens, ranks=1, groups=(group,),
    )  # fmt: skip


class Served(NamedTuple):
    """One request. Times are seconds, sizes bytes; `late_s` after it should have begun."""

    seconds: float
    late_s: float
    tokens: int
    found: int
    wrong: int


class Replay:
    """Sends requests, and adds up what came of them.

    Attributes:
        lookups: seconds of each.
        late: seconds of those that were late.
        sources, misses: where what was found lay, and why the rest was not found -> blocks.
        skipped: why blocks were not stored -> how many.
        hits: blocks found, and got. wrong: blocks whose bytes were not those that were stored.
        copied_out, copied_in: bytes and seconds of copies out of L1 and into it.
    """

    def __init__(self, engine: Engine, space: Space, trace: Trace, name: str, patience_s: float) -> None:
        self._engine = engine
        self._space = space
        self._trace = trace
        self._name = name
        self._patience_s = patience_s
        self._attachment = Attachment(engine.descriptor)
        size = space.groups[0].nbytes
        self._here = bytearray(size)
        self._rest = bytes(size)
        self._hashes: dict[int, bytes] = {}
        self.lookups: list[float] = []
        self.late: list[float] = []
        self.sources: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self.hits = self.wrong = self.stored = 0
        self.copied_out = self.copied_in = (0, 0.0)

    def run(self, speed: float | None, limit: int | None = None) -> float:
        """Send the trace, `speed` times as fast as it was recorded; None: as fast as it goes. The seconds it took.

        Raises `ConfigError` for one that would take longer than a year.
        """
        times_s = self._trace.times_s
        if speed is not None and (takes_s := (times_s[-1] - times_s[0]) / speed) > MAX_S:
            raise ConfigError(f"{self._trace.name} takes {takes_s / 86400:.3g} days so: a higher --speed, or `max`")
        total = len(self._trace.ends) if limit is None else min(limit, len(self._trace.ends))
        begun, first_s = time.monotonic(), self._trace.times_s[0]
        with Progress("replaying", total, "requests") as progress:
            for number, (at_s, blocks) in enumerate(self._trace.requests()):
                if number == total:
                    break
                if speed is not None:
                    self._await(begun + (at_s - first_s) / speed)
                self._send(number, blocks)
                progress.add(1)
        return time.monotonic() - begun

    def close(self) -> None:
        """Let go of the arena."""
        self._attachment.close()

    def _await(self, due: float) -> None:
        ahead = due - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        elif -ahead > LATE_S:
            self.late.append(-ahead)

    def _send(self, number: int, blocks: Sequence[int]) -> None:
        hashes = [self._hash(block) for block in blocks]
        request = f"{self._name}/{number}"
        asked = Asked(id=request, tokens=len(blocks) * self._space.chunk_tokens)
        begun = time.perf_counter()
        lookup = self._engine.lookup(self._space, hashes, asked=asked)
        lookup.wait(self._patience_s)
        end = lookup.poll() or 0
        self.lookups.append(time.perf_counter() - begun)
        try:
            self._read(lookup, blocks)
        except LeaseError:
            end = 0
        finally:
            self._engine.release(lookup)
        self.hits += end
        _add(self.sources, lookup.sources)
        _add(self.misses, lookup.misses)
        if end < len(blocks):
            self._store(hashes, blocks, end, request)

    def _read(self, lookup: Any, blocks: Sequence[int]) -> None:
        copies = self._engine.retrieve(lookup, 0, [range(len(blocks))])
        begun = time.perf_counter()
        with self._attachment.use(lookup.arena) as view:
            for copy in copies if view is not None else ():
                assert view is not None
                copy_out(view.buffer[copy.slot : copy.slot + len(self._here)], [memoryview(self._here)])
                sound = self._here.startswith(self._mark(blocks, copy))
                self.wrong += not sound and view.generation(copy.slot) == copy.generation
        self.copied_out = _sum(self.copied_out, len(copies) * len(self._here), begun)

    def _store(self, hashes: Sequence[bytes], blocks: Sequence[int], first: int, request: str) -> None:
        plan = self._engine.reserve(self._space, hashes, first, len(hashes), [range(len(hashes))], request=request)
        begun = time.perf_counter()
        with self._attachment.use(plan.arena) as view:
            for copy in plan.copies if view is not None else ():
                assert view is not None
                mark = self._mark(blocks, copy)
                parts = [memoryview(mark), memoryview(self._rest)[len(mark) :]]
                copy_in(parts, view.buffer[copy.slot : copy.slot + len(self._here)])
            written = view is not None
        if plan.id:
            self._engine.publish(plan.id, written)
        self.stored += len(plan.copies) if written else 0
        self.copied_in = _sum(self.copied_in, len(plan.copies) * len(self._here), begun)
        _add(self.skipped, {reason: n for reason, n in plan.skipped.items() if reason != "known"})

    def _mark(self, blocks: Sequence[int], copy: Copy) -> bytes:
        """What a block begins with; zeroes follow."""
        return blocks[copy.blocks[0]].to_bytes(_MARK, "little")[: len(self._here)]

    def _hash(self, block: int) -> bytes:
        found = self._hashes.get(block)
        if found is None:
            found = self._hashes[block] = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=16).digest()
        return found


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, number in more.items():
        total[name] = total.get(name, 0) + number


def _sum(total: tuple[int, float], nbytes: int, begun: float) -> tuple[int, float]:
    return total[0] + nbytes, total[1] + time.perf_counter() - begun
