"""The face of a store that engine plugins are written for whose engine owns its host memory: objects between the
caller's buffers and the cache, the same with the tiers in this process and behind a server."""

from collections.abc import Sequence
from typing import Protocol

from kvcore.engine.space import ModelSpec
from kvcore.engine.store_space import StoreSpace
from kvcore.observe import Asked


class ObjectStore(Protocol):
    """Batches of objects between the caller's buffers and the cache. Thread-safe.

    An object is the KV of one engine block (or page) of one KV group: `ModelSpec.block_tokens` tokens, all layers of
    the group, all `ModelSpec.ranks`. Its payload has `StoreSpace.layouts[group].nbytes` bytes; what they mean is the
    engine's business. `register` a model, then call the others as often as you like.

    All calls block; those that touch the cache are bounded in time, and none of them raises: what could not be done is
    False, and a metric or a log line says why. That holds for a store that is down or slow, for objects that are torn,
    and for what cannot be an object: a hash that is not 16 to 64 bytes long, a `group` that the model does not have,
    buffers that are not as described or do not have the payload's length, a space that another store has made.

    `hashes` name blocks; each must cover its block's tokens and all tokens before them. `buffers[i]` are the ranges of
    memory whose concatenation is the payload of `hashes[i]`: contiguous `memoryview`s of unsigned bytes. They are
    lent for the time of the call: nothing is written into them after it has returned, and `True` is never said of bytes
    that are not those stored. Anything iterable will do for `hashes`, `buffers` and each of them; it is walked through
    once.
    """

    def register(self, spec: ModelSpec, keys: str, tenant: str = "") -> StoreSpace:
        """Give a model (and a tenant: nobody sees another's objects) its space. Waits for no server.

        `keys` names how the caller makes hashes, with a version, such as `acme-page/1`: objects are only found under
        the scheme they were stored under. `tenant` is a name of at most 256 printable characters. Raises `LayoutError`
        or `ConfigError` for what cannot be stored so.
        """

    def wait_ready(self, timeout_s: float) -> bool:
        """Is the cache there, and not closed? Waits at most `timeout_s` (seconds) for the connection to a server, which
        `open_store` does not wait for: until then everything is a miss. Tiers in this process are ready at once."""

    def prefix(
        self,
        space: StoreSpace,
        hashes: Sequence[bytes],
        group: int = 0,
        asked: Asked | None = None,
        begin: int = 0,
    ) -> int:
        """How many of the front are there. A hint: each may still be gone when it is loaded. `asked`, `begin`: see
        `exists`."""

    def exists(
        self,
        space: StoreSpace,
        hashes: Sequence[bytes],
        group: int = 0,
        asked: Asked | None = None,
        begin: int = 0,
    ) -> list[bool]:
        """Which are there, as a hint. All tiers are asked at once, and waited for at most half of `lookup_timeout`.

        Args:
            asked: whose blocks these are, which follow each other: then the answer is on record (`kvcore explain`).
                `Asked()` where an engine names no requests.
            begin: the number of the first of them in its request.
        """

    def load(
        self,
        space: StoreSpace,
        hashes: Sequence[bytes],
        buffers: Sequence[Sequence[memoryview]],
        group: int = 0,
        request: str = "",
    ) -> list[bool]:
        """Bring each object into its buffers; which of them are there now. Buffers whose answer is False may hold
        anything. `request`: the `Asked.id` of the request they are for, for the record."""

    def store(
        self,
        space: StoreSpace,
        hashes: Sequence[bytes],
        buffers: Sequence[Sequence[memoryview]],
        group: int = 0,
        request: str = "",
    ) -> list[bool]:
        """Keep each object; which are in at least one tier now, or in the memory of the server, which writes them to
        its tiers in the background. Tiers are written what their `write:` says.

        Of a batch that a tier has no room for, the front is kept. What a server has taken may yet not reach a tier, as
        when more is stored than its tiers write meanwhile (a call with more than half of L1 waits for them, for
        `lookup_timeout` in all): then it is there until L1 needs the room, and counted by the server in
        `kvcore_tier_dropped_total`, by reason.
        """

    def delete(self, space: StoreSpace, hashes: Sequence[bytes], group: int = 0) -> None:
        """Forget the objects, in every tier. One that is in use at a server stays."""

    @property
    def lookup_timeout_s(self) -> float:
        """`lookup_timeout`, the server's where there is one: how long a request may wait for what is asked for it."""

    def stats(self) -> dict[str, float]:
        """What this store has counted, as a flat dict, histogram buckets aside. Costs no call to the cache."""

    def metrics_text(self) -> str:
        """The same in the Prometheus text format, buckets included."""

    def close(self) -> None:
        """Release everything. Idempotent. Whatever is asked afterwards is a miss.

        Takes at most about half a minute: with tiers in this process, calls under way are waited for (20 s) and what is
        written in the background (10 s); a connection is left within 2 s.
        """


Buffers = Sequence[Sequence[memoryview]]
"""Per object, the ranges of memory that hold its payload, in order."""
