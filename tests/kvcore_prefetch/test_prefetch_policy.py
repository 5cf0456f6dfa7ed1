"""The policy, replayed: it helps where the next turn can be foreseen, and brings nothing where it cannot."""

import random

import pytest
from replayed import Cache, Users

SECONDS = 300.0
WARM_S = 60.0


def replay(cache: Cache, talks: Users, documents: Users, begin: float, end: float) -> None:
    """Conversations, and documents of many chunks that nobody asks for again."""
    requests = talks.requests(begin, end)
    requests += [(at, [b"d" + h[1:] for h in hashes]) for at, hashes in documents.requests(begin, end, chunks=40)]
    cache.run(sorted(requests))


def tool(rng: random.Random) -> float:
    return 6 * rng.lognormvariate(0, 0.5)


def hit_rate(policy: bool, seed: int) -> tuple[float, Cache]:
    cache = Cache(800, policy)
    talks, documents = Users(seed, 0.25, 0.9, tool), Users(seed + 1, 3.0, 0.0, tool)
    replay(cache, talks, documents, 0.0, WARM_S)
    hits, asked = cache.hits, cache.asked
    replay(cache, talks, documents, WARM_S, SECONDS)
    return (cache.hits - hits) / (cache.asked - asked), cache


def test_next_turns_are_found_that_documents_had_pushed_out() -> None:
    without = [hit_rate(False, seed)[0] for seed in (1, 3)]
    with_it = [hit_rate(True, seed) for seed in (1, 3)]
    assert sum(rate for rate, _ in with_it) > 1.25 * sum(without)
    for _, cache in with_it:
        assert cache.used > 0.25 * cache.brought > 0


def test_where_nobody_comes_back_nothing_is_brought() -> None:
    cache = Cache(800)
    cache.run(Users(1, 4.0, 0.0, tool).requests(0.0, SECONDS, chunks=40))
    assert cache.policy.within is not None
    assert (cache.brought, cache.policy.right) == (0, None)


def test_those_that_are_as_likely_do_not_drive_each_other_out() -> None:
    """When any conversation is as likely as any other to come next, another one in L1 is no better."""
    rates = []
    for policy in (False, True):
        cache = Cache(200, policy)
        cache.run(Users(1, 1.0, 0.85, lambda rng: rng.expovariate(1 / 6)).requests(0.0, SECONDS))
        rates.append(cache.hits / cache.asked)
        assert cache.brought < 0.05 * cache.asked
    assert rates[1] > 0.95 * rates[0]


def test_it_stops_when_the_users_do_something_else_and_begins_again() -> None:
    cache = Cache(800)
    talks, documents = Users(1, 0.25, 0.9, tool), Users(2, 3.0, 0.0, tool)
    replay(cache, talks, documents, 0.0, SECONDS)
    assert cache.policy.acting
    talks.returns = 0.0  # they all go away in the midst of it
    talks.forget()
    replay(cache, talks, documents, SECONDS, 2 * SECONDS)
    before = cache.brought
    replay(cache, talks, documents, 2 * SECONDS, 3 * SECONDS)
    assert cache.brought - before < 100  # what it foresees is only foreseen
    talks.returns = 0.9
    replay(cache, talks, documents, 3 * SECONDS, 5 * SECONDS)
    assert cache.brought - before > 500


@pytest.mark.parametrize("min_used", [0.1, 0.9])
def test_the_share_that_must_be_used_is_the_users_to_say(min_used: float) -> None:
    cache = Cache(800, min_used=min_used)
    replay(cache, Users(1, 0.25, 0.9, tool), Users(2, 3.0, 0.0, tool), 0.0, SECONDS)
    assert (cache.brought > 0) == (min_used == 0.1)
