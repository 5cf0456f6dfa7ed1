"""What clients and the server say to each other, and how it is framed.

A connection carries frames: a length of four bytes, little endian, and so many bytes of msgpack, at most `MAX_FRAME`.
The first message of each side is a mapping whose fields `protocol` and `version` never change; all others are arrays
that begin with their tag. Nothing is pickled, and a message of another shape ends its connection.

Hashes travel as one range of bytes, `hash_bytes` each; slots, generations and indexes as packed arrays.
"""

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from kvcore.api.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from kvcore.engine import Asked, ModelSpec
from kvcore.engine.attach import LENGTH, PROTOCOL, Attach, Attached, Refused
from kvcore.engine.space import MAX_GROUPS
from kvcore.observe.decisions import kept_word
from kvcore.service.frames import MAX_FRAME, Frames, ProtocolError

__all__ = ["LENGTH", "MAX_FRAME", "PROTOCOL", "Attach", "Attached", "Frames", "ProtocolError", "Refused"]

MAX_HASHES = 16384
"""Hashes of the longest lookup or store: its client asks for the front of a longer one. More would take the server's
one thread from others for longer than a few milliseconds."""
MAX_OBJECTS = 65536
"""The same for the objects of all groups, see `most_hashes`."""
MAX_GREETING = 4096
"""Bytes of the longest first message."""
MAX_WELCOME = 64 << 10
"""Bytes of the server's answer to it."""
MAX_DRAIN_S = 86400.0
MAX_ID = 1 << 53
MAX_WORD = 512
"""Characters of what is only kept for people: more are cut off by the client."""

_CACHED = 1024

T = TypeVar("T")
Id = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ID)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Word = Annotated[str, msgspec.Meta(max_length=MAX_WORD)]
HashBytes = Annotated[int, msgspec.Meta(ge=MIN_HASH_BYTES, le=MAX_HASH_BYTES)]
Packed = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME)]


# -- first messages ----------------------------------------------------------------------------------------------------


class Preamble(msgspec.Struct, frozen=True):
    """What the first message of every version holds."""

    protocol: int
    version: str


class Hello(msgspec.Struct, tag="hello", tag_field="kind", frozen=True):
    """A client's first message. `name` and `pid` are for people."""

    protocol: int
    version: str
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    pid: int = 0
    token: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Welcome(msgspec.Struct, tag="welcome", tag_field="kind", frozen=True):
    """The server's answer. `session` names this connection's epoch, and who knows it may attach workers to it.

    Args:
        arena: the descriptor of the server's arena. lease_s: how long leases last. lookup_timeout_s: the longest time
            to a lookup's answer. tiers: name -> plugin. queued: whether `Queued` is of use to anyone.
    """

    protocol: int
    version: str
    session: str
    arena: dict[str, int | str]
    lease_s: float
    lookup_timeout_s: float
    tiers: dict[str, str]
    queued: bool = False


# -- from a client -----------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what a client says after the first message. Each `id` is the client's to choose, once."""


class Register(Request, tag="register"):
    """A model's space, called `id` from here on. Answered by `Registered`."""

    id: Id
    spec: ModelSpec
    tenant: Name
    chunk_tokens: Annotated[int, msgspec.Meta(gt=0, le=1 << 24)]
    key_scheme: Name
    salt: Name


class Forget(Request, tag="forget"):
    """The client needs a space no more. No answer; its objects stay."""

    space: Id


class Who(Request):
    """Whose request it is, for the record: see `Asked`, whose token ids stay where they are. `first`: the number of the
    first chunk in its request."""

    first: Id
    id: Word
    tokens: Id
    adapter: Word
    salt: Word
    trace: Annotated[dict[Word, Word], msgspec.Meta(max_length=4)] | None


class Find(Request, tag="find"):
    """A lookup. Answered by `Found`, at once or, after `Searching`, when tiers have been asked.

    Args:
        each: not the prefix that is there, but every hash for itself.
    """

    id: Id
    space: Id
    hash_bytes: HashBytes
    hashes: Packed
    each: bool = False
    who: Who | None = None


class Queued(Request, tag="queued"):
    """A request with these chunks will be looked up when it is its turn. No answer. Only to a server that asks for it.

    Args:
        hashes: from the first chunk on.
    """

    space: Id
    hash_bytes: HashBytes
    hashes: Packed
    who: Who | None = None


class Exists(Request, tag="exists"):
    """Which objects of a space with one group are there, in L1 or a tier? Answered by `There`."""

    id: Id
    space: Id
    hash_bytes: HashBytes
    hashes: Packed


class Delete(Request, tag="delete"):
    """Forget objects of a space with one group, in L1 and the tiers. Answered by `Number`."""

    id: Id
    space: Id
    hash_bytes: HashBytes
    hashes: Packed


class Hold(Request, tag="hold"):
    """Start the time of a lookup's leases again. No answer."""

    lookup: Id


class Use(Request, tag="use"):
    """The same; and what was loaded for this lookup stays, because so many tokens of it are being read. No answer."""

    lookup: Id
    tokens: Id


class Take(Request, tag="take"):
    """What has come since I asked last, for a lookup that has said what is coming? Starts the time of its leases again.
    Answered by `Taken`."""

    id: Id
    lookup: Id


class Release(Request, tag="release"):
    """End a lookup's leases. No answer."""

    lookup: Id


class Reserve(Request, tag="reserve"):
    """Slots to write. Answered by `Reserved`.

    Args:
        parent: hash of the chunk before, if any. chosen: per group the indexes of the wanted hashes, packed; None for
            all of them. chained: each hash is of the chunk after that of the one before it. request: for which
            it is, for the record.
    """

    id: Id
    space: Id
    hash_bytes: HashBytes
    hashes: Packed
    parent: Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)]
    chosen: Annotated[tuple[Packed | None, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    chained: bool = True
    request: Word = ""


class Publish(Request, tag="publish"):
    """The copies of a plan have ended, well or not. No answer."""

    plan: Id
    ok: bool


class Prefilled(Request, tag="prefilled"):
    """So many tokens of prompts were computed in so long. No answer."""

    space: Id
    tokens: Id
    seconds: float


class Clear(Request, tag="clear"):
    """Forget a space's objects in L1. Answered by `Number`."""

    id: Id
    space: Id


class Drain(Request, tag="drain"):
    """Wait until the tiers have taken what waits. Answered by `Number`, by then."""

    id: Id
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)]


class News(Request, tag="news"):
    """What has come and gone in my spaces since I asked last? The first of them begins the listening. Answered by
    `Told`."""

    id: Id


class Ping(Request, tag="ping"):
    """Are you there? Answered by `Number`."""

    id: Id


# -- from the server ---------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, array_like=True, gc=False):
    """Base of what the server says after the first message. `id`: of what is answered."""


class Slots(msgspec.Struct, array_like=True, gc=False):
    """Where the objects of one group are: packed arrays. Empty `indexes`: the first ones, in order."""

    indexes: bytes
    slots: bytes
    generations: bytes


class Registered(Reply, tag="registered"):
    """The space's namespace, or why it cannot be had."""

    id: int
    namespace: bytes
    refused: str = ""


class Searching(Reply, tag="searching"):
    """Tiers are asked; the answer comes later."""

    id: int


class Found(Reply, tag="found"):
    """A lookup's answer: of its hashes the first `chunks` can be retrieved, or with `each` those in `groups`.

    Args:
        held: whether there are leases to release. sources, misses, broke, blame: see `EngineLookup`. leased: when they
            began, by the monotonic clock of this machine; 0: with the question.
    """

    id: int
    chunks: int
    held: bool
    sources: dict[str, int]
    misses: dict[str, int]
    groups: list[Slots]
    broke: str = ""
    blame: str = ""
    leased: float = 0.0


class Coming(Reply, tag="coming"):
    """Between `Searching` and `Found`, once some of it is there: how many `chunks` a lookup of one group will find if
    nothing fails, and its sources then."""

    id: int
    chunks: int
    sources: dict[str, int]


class Taken(Reply, tag="taken"):
    """Where that is what has come. `held`: its leases have not ended."""

    id: int
    held: bool
    fresh: Slots


class Reserved(Reply, tag="reserved"):
    """A plan's slots, per group; `plan` is 0 when there are none."""

    id: int
    plan: int
    skipped: dict[str, int]
    groups: list[Slots]


class Heard(msgspec.Struct, array_like=True, gc=False):
    """Objects of one kind that came to be in a tier (`here`), or left it."""

    here: bool
    tier: str
    namespace: bytes
    group: int
    hashes: list[bytes]


class Told(Reply, tag="told"):
    """In the order in which it happened. `lost`: there was more than the server keeps, and this is not all."""

    id: int
    news: list[Heard]
    lost: bool


class There(Reply, tag="there"):
    """`indexes`, packed: of the hashes that are there."""

    id: int
    indexes: bytes


class Number(Reply, tag="number"):
    """The answer to what asks for no more than that."""

    id: int
    value: int


AnyRequest = (
    Register | Forget | Find | Hold | Use | Take | Release | Reserve | Publish | Prefilled | Exists | Delete | Clear
    | Drain | News | Ping | Queued
)  # fmt: skip
AnyReply = Registered | Searching | Coming | Found | Taken | Reserved | Told | There | Number

_preamble = msgspec.msgpack.Decoder(Preamble)
_greeting = msgspec.msgpack.Decoder(Hello | Attach)
_welcome = msgspec.msgpack.Decoder(Welcome | Refused)
_request: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyRequest)
_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyReply)
_encoder = msgspec.msgpack.Encoder()


def decode_preamble(body: memoryview) -> Preamble:
    """What can be read of a first message of any version. Raises `ProtocolError`."""
    return _decoded(_preamble, body)


def decode_greeting(body: memoryview) -> Hello | Attach:
    """A client's or a worker's first message. Raises `ProtocolError`."""
    return _decoded(_greeting, body)


def decode_welcome(body: memoryview) -> Welcome | Refused:
    """The server's first message. Raises `ProtocolError`."""
    return _decoded(_welcome, body)


def decode_request(body: memoryview) -> Any:
    """A client's message. Raises `ProtocolError`."""
    return _decoded(_request, body)


def decode_reply(body: memoryview) -> Any:
    """A server's message. Raises `ProtocolError`."""
    return _decoded(_reply, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: memoryview) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that is none: {error}") from error


def frame(message: msgspec.Struct) -> bytearray:
    """A message with its length before it."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return buffer


def pack_slots(values: Sequence[int]) -> bytes:
    """Numbers of 64 bits."""
    return array("Q", values).tobytes()


def pack_indexes(values: Sequence[int]) -> bytes:
    """Numbers of 32 bits."""
    return array("I", values).tobytes()


def unpack_slots(data: bytes) -> "Sequence[int]":
    """What `pack_slots` made."""
    return memoryview(data).cast("Q")


def unpack_indexes(data: bytes) -> "Sequence[int]":
    """What `pack_indexes` made. Raises `ProtocolError`."""
    if len(data) % 4:
        raise ProtocolError("a list of indexes that is none")
    return memoryview(data).cast("I")


def who_of(asked: Asked, first: int) -> Who:
    """What a server is told of a request; whatever an engine has put there, it can be sent."""
    trace = None
    if asked.trace:
        trace = {word(name): word(value) for name, value in list(asked.trace.items())[:4]}
    tokens = asked.tokens if type(asked.tokens) is int and 0 <= asked.tokens < MAX_ID else 0
    return Who(first, word(asked.id), tokens, word(asked.adapter), word(asked.salt), trace)


def asked_of(who: Who) -> Asked:
    """The same at the server."""
    return Asked(who.id, who.tokens, None, who.adapter, who.salt, who.trace)


def word(text: Any) -> str:
    """Text that may be sent as a `Word`."""
    return kept_word(text, MAX_WORD)


def most_hashes(groups: int) -> int:
    """Hashes that one message about a space with so many groups may hold."""
    return min(MAX_HASHES, MAX_OBJECTS // groups)


def whole(found: Slots, count: int) -> bool:
    """Whether its arrays belong together: without indexes, they are of all `count` objects."""
    slots, indexes = len(found.slots), len(found.indexes)
    return slots == len(found.generations) and slots == (2 * indexes if indexes else 8 * count if slots else 0)


def split_hashes(data: bytes, hash_bytes: int) -> list[bytes]:
    """The hashes in one range of bytes. Raises `ProtocolError`."""
    if len(data) % hash_bytes:
        raise ProtocolError(f"{len(data)} bytes are no hashes of {hash_bytes}")
    count = len(data) // hash_bytes
    if count > MAX_HASHES:
        raise ProtocolError(f"{count} hashes, at most {MAX_HASHES} are taken")
    if count <= _CACHED:
        return list(_splitter(hash_bytes, count).unpack(data))
    return [data[at : at + hash_bytes] for at in range(0, len(data), hash_bytes)]


@lru_cache(maxsize=256)
def _splitter(hash_bytes: int, count: int) -> struct.Struct:
    return struct.Struct(f"{hash_bytes}s" * count)  # six times as fast as slicing
