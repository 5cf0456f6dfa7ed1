"""The protocol, without a server: replies cut at any place give the same values, nonsense is an error."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.api.buffers import drop, take
from kvcore.testing.memory import Room, split
from kvcore_redis.connection import GROUP_BYTES, GROUP_COMMANDS, Command, _grouped
from kvcore_redis.resp import BUFFER_BYTES, ProtocolError, Reader, ReplyError, encode, encode_set
from kvcore_redis.stream import Lost


class Pieces:
    """A source that hands out bytes in pieces of the given sizes, over and over."""

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self._data = data
        self._sizes = sizes
        self._calls = 0

    def receive(self, into: memoryview) -> int:
        count = min(len(into), len(self._data), self._sizes[self._calls % len(self._sizes)])
        self._calls += 1
        if count == 0:
            raise Lost("the end")
        into[:count], self._data = self._data[:count], self._data[count:]
        return count

    def receive_all(self, views: Sequence[memoryview]) -> None:
        while views:
            views = drop(views, self.receive(views[0]))


_values = st.binary(max_size=3 * BUFFER_BYTES)
_replies = st.one_of(
    st.tuples(st.just("value"), _values),
    st.tuples(st.just("none"), st.just(b"")),
    st.tuples(st.just("status"), st.just(b"OK")),
    st.tuples(st.just("number"), st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n)),
    st.tuples(st.just("refusal"), st.text("ABC xyz", max_size=200).map(lambda t: t.encode())),
)


def encoded(what: str, data: bytes) -> bytes:
    forms = {
        "value": b"$%d\r\n%b\r\n" % (len(data), data),
        "none": b"$-1\r\n",
        "status": b"+%b\r\n" % data,
        "number": b":%b\r\n" % data,
        "refusal": b"-%b\r\n" % data,
    }
    return forms[what]


@given(
    replies=st.lists(_replies, max_size=8),
    sizes=st.lists(st.integers(1, 2 * BUFFER_BYTES), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 2 * BUFFER_BYTES), max_size=4),
    short=st.integers(0, 3 * BUFFER_BYTES),
)
def test_replies_cut_anywhere(replies: list[tuple[str, bytes]], sizes: list[int], cuts: list[int], short: int) -> None:
    """Each value lands in its buffers, or is passed over when they are `short`; what follows it is read right."""
    reader = Reader(Pieces(b"".join(encoded(*reply) for reply in replies), sizes))
    for what, data in replies:
        if what in ("value", "none"):
            room = Room(short, cuts)
            got = reader.value(room.buffers)
            assert got == (len(data) if what == "value" else None)
            if got is not None and got <= short:
                assert bytes(room.view[:got]) == data
                assert room.clean_from(got)
            else:
                assert room.clean_from(0)
        else:
            expected = {"status": data, "number": int(data) if what == "number" else 0, "refusal": None}[what]
            line = reader.line()
            assert line == (ReplyError(data.decode()) if what == "refusal" else expected)
    assert reader.empty


@pytest.mark.parametrize(
    "data",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$x\r\n",
        b"$5\r\nhello, world\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\r\n",
        b"$" + b"1" * BUFFER_BYTES,
    ],
)
def test_nonsense_instead_of_a_value(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Reader(Pieces(data, [7])).value([memoryview(bytearray(64))])


@pytest.mark.parametrize("data", [b"$1\r\nx\r\n", b":one\r\n", b"*0\r\n", b"PONG\r\n"])
def test_nonsense_instead_of_a_line(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Reader(Pieces(data, [7])).line()


@pytest.mark.parametrize("cut", range(1, 19))
def test_an_end_in_the_middle_of_a_value(cut: int) -> None:
    """It is no shorter value: it is an error."""
    data = b"$10\r\n0123456789\r\n"
    if cut < len(data):
        with pytest.raises(Lost):
            Reader(Pieces(data[:cut], [3])).value([memoryview(bytearray(10))])
    else:
        assert Reader(Pieces(data, [3])).value([memoryview(bytearray(10))]) == 10


def test_a_refusal_has_a_code() -> None:
    reader = Reader(Pieces(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", [1000]))
    refusal = reader.value([])
    assert isinstance(refusal, ReplyError)
    assert refusal.code == "OOM"


def test_commands() -> None:
    assert encode(b"GET", b"a b\r\n") == b"*2\r\n$3\r\nGET\r\n$5\r\na b\r\n\r\n"
    assert encode_set(b"k", 3, None) == (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\n", b"\r\n")
    head, tail = encode_set(b"k", 3, 60_000)
    assert head + b"abc" + tail == b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\nabc\r\n$2\r\nPX\r\n$5\r\n60000\r\n"


@given(sizes=st.lists(st.sampled_from([0, 1, GROUP_BYTES // 3, GROUP_BYTES, 3 * GROUP_BYTES]), max_size=20))
def test_groups_are_bounded(sizes: list[int]) -> None:
    """All commands, in order, and no group larger than allowed unless it is of one command."""
    commands = [Command(b"%d" % i, (), nbytes) for i, nbytes in enumerate(sizes)]
    groups = _grouped(commands)
    assert [command for group in groups for command in group] == commands
    assert all(len(group) == 1 or sum(c.nbytes for c in group) <= GROUP_BYTES for group in groups)


def test_groups_of_small_commands_are_bounded() -> None:
    groups = _grouped([Command(b"", ())] * (3 * GROUP_COMMANDS + 1))
    assert [len(group) for group in groups] == [GROUP_COMMANDS] * 3 + [1]


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6), at=st.integers(0, 250))
def test_take_and_drop(data: bytes, cuts: list[int], at: int) -> None:
    views = split(memoryview(data), cuts)
    assert b"".join(take(views, at)) == data[:at]
    assert b"".join(drop(views, at)) == data[at:]
