"""The face of a cache that engine plugins are written for: the same in this process and behind a server."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvcore.engine.space import ModelSpec, Space
from kvcore.observe import Asked, Decisions
from kvcore.transfer.plan import Copy


class StorePlan(NamedTuple):
    """What a worker must copy for one `reserve`.

    Args:
        id: what `publish` is told; 0 when there is nothing to copy.
        copies: the copies, into slots of `arena`.
        skipped: why chunks were left out -> how many.
        arena: the token of the arena that the slots lie in, see `Engine.descriptor`.
    """

    id: int
    copies: list[Copy]
    skipped: dict[str, int]
    arena: str


class Coming(NamedTuple):
    """What a lookup will have found once the tiers have delivered what they said they have.

    Args:
        end: its answer then.
        sources: its `sources` then.
    """

    end: int
    sources: dict[str, int]


class EngineLookup(Protocol):
    """One request's lookup.

    Attributes:
        first: index of the first chunk that the engine does not hold itself.
        answer: what `poll` last said.
        sources: where found chunks were (`l1` or a tier's name) -> objects. Complete once `poll` has answered.
        misses: why the others were not -> objects. What lies behind the end of the prefix counts as what ended it.
        broke, blame: why there is no more, see `Decision`.
        arena: the token of the arena that its copies refer to, see `Engine.descriptor`.
    """

    first: int
    answer: int | None
    sources: dict[str, int]
    misses: dict[str, int]
    broke: str
    blame: str
    arena: str

    def poll(self) -> int | None:
        """None while tiers are asked; then the n for which chunks `[first, n)` can be retrieved. Never blocks.

        Each poll keeps the leases alive; once they have ended, or the server has, the answer is `first`: nothing.
        """

    def wait(self, timeout_s: float) -> bool:
        """Is it answered? Waits at most `timeout_s`."""


class Engine(Protocol):
    """One cache. Thread-safe; no method raises for a fault of the cache, but for what is said to.

    `register` a model, then for each request: `lookup`, `EngineLookup.poll`, `retrieve`, `release`; and as it is
    computed: `reserve`, `publish`. A worker attaches the arena that `descriptor` describes and copies by plan. A plan
    or a lookup is only good for the arena whose token it carries: after a server's restart there is another.

    Attributes:
        decisions: the record of its lookups.
    """

    decisions: Decisions

    def register(self, spec: ModelSpec, tenant: str = "") -> Space:
        """Give a model (and a tenant: nobody sees another's objects) its space. Waits for no server.

        Raises `LayoutError` or `ConfigError` for a model that cannot be cached as asked.
        """

    def lookup(self, space: Space, hashes: Sequence[bytes], first: int = 0, asked: Asked | None = None) -> EngineLookup:
        """Ask for the chunks `[first, len(hashes))` of a request; the engine holds those before `first` itself.

        All hashes have one length, of 16 to 64 bytes: others are refused, here and by `reserve`. A server is asked for
        16,384 chunks at most (fewer where a model has more than four groups), those at the front.

        `asked` says whose they are, for the record (`kvcore explain`). Call it also for a request without a whole
        chunk: then that is on record. `hashes` stay there as they are: do not change them.
        """

    def queued(self, space: Space, hashes: Sequence[bytes], asked: Asked | None = None) -> None:
        """A request with these chunks, all from its first on, waits for its turn, when it will be looked up. Hooks hear
        of it, which may have them brought into L1 by then. Worth a call only where requests can wait. `asked`: whose
        they are, for traces."""

    def coming(self, lookup: Any) -> Coming | None:
        """Before the answer, once some of it is there: what it will be if nothing fails. None where that is not known:
        while tiers are asked, with several groups or a window, or where several servers have to agree."""

    def retrieve(self, lookup: Any, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """The plan that loads an answered lookup's chunks into the engine's blocks.

        Args:
            first_block: index within the request of the first block to load.
            block_ids: per group, the engine's block ids of the request from its block 0. A negative id is skipped.

        `release` the lookup when every rank has copied. Raises `LeaseError` when the leases have ended: then nothing
        that was promised can be had any more, and the engine must compute it.
        """

    def arrived(self, lookup: Any, first_block: int, block_ids: Sequence[Sequence[int]]) -> list[Copy]:
        """Instead of `retrieve`, for a lookup that has said what is `coming`: the plan of what has come since the last
        call, in any order. With the first call after the answer all has come that will, which may be less than was
        said: what counts then is the answer.

        Arguments as with `retrieve`, with the blocks of all that is coming in every call: what has come is given once.
        Raises `ValueError` where blocks are missing, and `LeaseError` as `retrieve` does.
        """

    def renew(self, lookup: Any) -> bool:
        """Start the time of the lookup's leases again. False when they have ended: look up again."""

    def release(self, lookup: Any) -> None:
        """End the lookup's leases. Idempotent. Call it after the copy, and on every abort."""

    def reserve(
        self,
        space: Space,
        hashes: Sequence[bytes],
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
        request: str = "",
    ) -> StorePlan:
        """Slots for the chunks `[first, last)` of a request, and the plan that fills them. `request`: its `Asked.id`.

        Chunks that are cached, on their way, or find no room are skipped and counted; so are those with a block that
        the engine no longer holds (a negative id), and those beyond what a server takes at once. `publish` the plan
        when every rank has copied.
        """

    def publish(self, plan_id: int, ok: bool = True) -> None:
        """Every rank has copied (`ok`) or one has failed: publish the plan's objects, or abandon them.

        Late, repeated and unknown calls are harmless.
        """

    def prefilled(self, space: Space, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of prompts in so long: what it computes sooner than a tier delivers is
        not loaded. Call it once per step that mostly computes prompts; without it, everything found is loaded."""

    def descriptor(self) -> dict[str, Any] | None:
        """How workers reach the arena of now: what `attach_arena` takes, as plain picklable values; None while there is
        no server. Its `token` names the arena: lookups and plans carry it, and may be copied with that one only."""

    def clear(self, space: Space) -> int:
        """Forget the space's objects in L1 (not in the tiers); how many. What is being read goes with its last reader,
        and what waits for a tier is not written."""

    def drain(self, timeout_s: float = 10.0) -> int:
        """Wait until the tiers have taken what waits; the number of objects still waiting at the deadline."""

    @property
    def tiers(self) -> dict[str, str]:
        """The tiers' names in order, each with the name of its storage plugin."""

    def stats(self) -> dict[str, float]:
        """What this engine has counted, as a flat dict, histogram buckets aside."""

    def metrics_text(self) -> str:
        """The same in the Prometheus text format, buckets included."""

    def close(self) -> None:
        """Release everything. Idempotent. An engine that owns its cache first writes out what waits, in bounded
        time."""
