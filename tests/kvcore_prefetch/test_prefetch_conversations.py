"""Conversations are known again, grow with their answers, and are forgotten when there are too many."""

from kvcore.api import ObjectEvent, ObjectKey
from kvcore_prefetch.conversations import Conversation, Conversations

NS = b"n" * 16


def chain(*numbers: int) -> list[bytes]:
    return [i.to_bytes(32, "little") for i in numbers]


def event(number: int, parent: int | None = None, namespace: bytes = NS, reason: str = "") -> ObjectEvent:
    before = None if parent is None else parent.to_bytes(32, "little")
    return ObjectEvent(ObjectKey(namespace, number.to_bytes(32, "little"), 0), "l1", 100, reason, before)


def known(most: int = 1000) -> tuple[Conversations, list[Conversation]]:
    forgotten: list[Conversation] = []
    return Conversations(most, forgotten.append), forgotten


def test_a_prompt_that_goes_on_where_one_has_ended_is_its_next_turn() -> None:
    conversations, _ = known()
    first, gap, _ = conversations.turn(NS, chain(1, 2, 3), 10.0)
    assert gap is None
    again, gap, gone = conversations.turn(NS, chain(1, 2, 3, 4, 5), 25.0)
    assert (again, gap, gone) == (first, 15.0, False)
    assert (first.turns, first.hashes, first.used) == (2, chain(1, 2, 3, 4, 5), 25.0)
    other, gap, _ = conversations.turn(NS, chain(1, 2, 9), 30.0)  # shares a beginning
    assert other is not first
    assert gap is None
    assert conversations.turn(b"m" * 16, chain(1, 2, 3, 4, 5), 30.0).conversation is not first
    assert len(conversations) == 3


def test_an_answer_makes_it_longer() -> None:
    conversations, _ = known()
    talk = conversations.turn(NS, chain(1, 2), 0.0).conversation
    conversations.stored([event(1, 0), event(2, 1)], 1.0)
    conversations.stored([event(3, 2), event(4, 3)], 5.0)
    assert talk.hashes == chain(1, 2, 3, 4)
    assert talk.used == 5.0
    assert conversations.turn(NS, chain(1, 2, 3, 4, 5), 8.0).gap == 3.0


def test_a_request_that_was_queued_is_the_same_when_it_is_looked_up() -> None:
    conversations, _ = known()
    talk = conversations.turn(NS, chain(1, 2), 0.0, queued=True).conversation
    assert conversations.turn(NS, chain(1, 2), 5.0) == (talk, None, False)
    assert talk.turns == 1
    assert conversations.turn(NS, chain(1, 2), 9.0).gap == 9.0  # the same prompt once more


def test_a_lookup_over_a_server_names_the_end_only() -> None:
    conversations, _ = known()
    talk = conversations.turn(NS, chain(1, 2, 3), 0.0).conversation
    assert conversations.turn(NS, chain(3, 4), 5.0).conversation is talk
    assert talk.hashes == chain(1, 2, 3, 4)


def test_what_is_in_l1_and_what_has_left_it() -> None:
    conversations, _ = known()
    talk = conversations.turn(NS, chain(1, 2), 0.0).conversation
    other = conversations.turn(NS, chain(7, 8), 0.0).conversation
    assert [*conversations.here] == [talk, other]
    assert conversations.evicted([event(1, reason="room")]) == []  # not its end
    assert conversations.evicted([event(2, reason="room"), event(9)]) == [(talk, "room")]
    assert ([*conversations.here], [*conversations.gone]) == ([other], [talk])
    conversations.stored([event(2)], 5.0)  # loaded
    assert ([*conversations.here], [*conversations.gone]) == ([other, talk], [])
    assert talk.used == 0.0
    assert conversations.nbytes(talk) == 200
    conversations.evicted([event(2)])
    assert conversations.turn(NS, chain(1, 2, 3), 9.0) == (talk, 9.0, True)
    assert [*conversations.gone] == []


def test_the_oldest_are_forgotten() -> None:
    conversations, forgotten = known(most=10)
    talks = [conversations.turn(NS, chain(*range(100 * i, 100 * i + 4)), float(i)).conversation for i in range(1, 5)]
    assert forgotten == talks[:2]
    conversations.evicted([event(403)])
    conversations.turn(NS, chain(1, 2, 3, 4), 9.0)
    assert forgotten == [*talks[:2], talks[3]]  # what has left goes first
    alone, _ = known(most=3)
    alone.turn(NS, chain(1, 2, 3, 4, 5), 0.0)
    assert len(alone) == 1


def test_two_that_say_the_same_become_one() -> None:
    conversations, _ = known()
    conversations.turn(NS, chain(1, 2, 3), 0.0)
    short = conversations.turn(NS, chain(5, 2), 1.0).conversation
    conversations.stored([event(3, 2)], 2.0)
    assert len(conversations) == 1
    assert short.hashes == chain(5, 2, 3)
    conversations.evicted([event(3)])
    assert [*conversations.gone] == [short]
