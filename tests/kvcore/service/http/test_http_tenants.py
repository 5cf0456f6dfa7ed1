"""Tenants over HTTP: what they hold, and their quotas."""

from typing import Any
from urllib.parse import quote

import pytest

from kvcore.api import Entry, ObjectKey
from kvcore.builtin.eviction_lru import LruPolicy
from kvcore.l2 import Capacity
from kvcore.observe.decisions import tenant_shown
from kvcore.tenants import Division
from kvcore.testing.chunks import hashes, put, spec

DIVIDED = "l1: {size: 8MiB}\ntenants: {alice: {l1: 2MiB}, default: {l1: 1MiB}}"
NEAR = "[{name: near, storage: {plugin: faulty, storage: memory}}]"


def lru() -> LruPolicy:
    return LruPolicy(None, None)


def places(answer: Any, tenant: str) -> dict[str, dict[str, Any]]:
    (found,) = [t for t in answer.body["tenants"] if t["tenant"] == tenant]
    return {p["place"]: p for p in found["places"]}


def test_usage_and_quotas(serve: Any) -> None:
    engine, client = serve(NEAR, DIVIDED)
    alice, bob = engine.register(spec(), "alice"), engine.register(spec(), "bob/of the: other house")
    put(engine, alice, hashes())
    put(engine, bob, hashes(2))
    answer = client.get("/tenants")
    assert answer.body["total"] == len(answer.body["tenants"])
    assert answer.body["tenants"][0]["tenant"] == "alice"  # who holds most
    assert places(answer, "alice")["l1"]["used"] == 8 * alice.groups[0].nbytes
    assert places(answer, "alice")["l1"]["quota"] == 2 << 20
    hidden = tenant_shown(bob.tenant, ())  # whom the configuration does not name
    assert places(answer, hidden)["l1"]["quota"] == 1 << 20
    assert bob.tenant not in str(answer.body)
    assert places(client.get(f"/tenants?tenant={quote(hidden)}"), hidden) == places(answer, hidden)
    known = client.get(f"/tenants?tenant={quote(bob.tenant)}")
    assert places(known, bob.tenant) == places(answer, hidden)
    assert len(client.get("/tenants?limit=1").body["tenants"]) == 1
    assert client.get("/tenants?tenant=nobody").body == {"tenants": [], "total": 0}

    answer = client.ask("PUT", "/tenants/alice", {"quotas": {"l1": "1MiB"}})
    assert (answer.status, answer.body["places"][0]["quota"]) == (200, 1 << 20)
    assert places(client.get("/tenants?tenant=alice"), "alice")["l1"]["quota"] == 1 << 20
    answer = client.ask("PUT", "/tenants/bob%2Fof%20the%3A%20other%20house", {"quotas": {"l1": 3 << 20}})
    assert (answer.body["tenant"], answer.body["places"][0]["quota"]) == (bob.tenant, 3 << 20)
    assert places(client.get("/tenants"), bob.tenant)["l1"]["quota"] == 3 << 20  # it has been named
    assert client.get(f"/tenants?tenant={quote(hidden)}").body["total"] == 1
    client.ask("PUT", "/tenants/alice", {"quotas": {"l1": None}})
    assert places(client.get("/tenants"), "alice")["l1"]["quota"] == 1 << 20  # that of default


@pytest.mark.parametrize(
    ("quotas", "text"),
    [
        ({"near": "1MiB"}, "near is not divided among tenants"),
        ({"nowhere": 1}, "there is no place 'nowhere': the places are l1, near"),
        ({"l1": "1TiB"}, "does not fit l1, which has 8 MiB"),
        ({"l1": "much"}, "body.quotas.l1"),
        ({"l1": -1}, "body.quotas.l1"),
        ({}, "body.quotas"),
    ],
)
def test_quotas_that_are_refused(serve: Any, quotas: dict[str, Any], text: str) -> None:
    _, client = serve(NEAR, DIVIDED)
    answer = client.ask("PUT", "/tenants/alice", {"quotas": quotas})
    assert answer.status == 422
    assert text in answer.body["detail"]
    assert places(client.get("/tenants"), "alice")["l1"]["quota"] == 2 << 20


def test_quotas_change_all_together_or_not_at_all(serve: Any) -> None:
    _, client = serve(NEAR, DIVIDED)
    for quotas in ({"l1": "1MiB", "near": "1MiB"}, {"near": "1MiB", "l1": "1MiB"}, {"l1": "1MiB", "nowhere": None}):
        assert client.ask("PUT", "/tenants/alice", {"quotas": quotas}).status == 422
        assert places(client.get("/tenants"), "alice")["l1"]["quota"] == 2 << 20


def test_the_default_is_shown_and_changes(serve: Any) -> None:
    two = "[{storage: memory, capacity: 4MiB}]"
    engine, client = serve(two, "l1: {size: 8MiB}\ntenants: {alice: {l1: 2MiB}, default: {l1: 1MiB, memory: 3MiB}}")
    shown = places(client.get("/tenants?tenant=default"), "default")
    assert {place: (p["used"], p["quota"]) for place, p in shown.items()} == {
        "l1": (0, 1 << 20),
        "memory": (0, 3 << 20),
    }
    carol = engine.register(spec(), "carol")
    put(engine, carol, hashes(2))
    answer = client.ask("PUT", "/tenants/default", {"quotas": {"l1": "2MiB", "memory": None}})
    assert (answer.status, answer.body["tenant"]) == (200, "default")
    shown = {p["place"]: p for p in answer.body["places"]}
    assert (shown["l1"]["quota"], shown["l1"]["share"], shown["memory"]["quota"]) == (2 << 20, 2 << 20, 4 << 20)
    assert shown["l1"]["used"] == 2 * carol.groups[0].nbytes  # of all without a quota of their own
    assert places(client.get("/tenants"), "default")["l1"] == shown["l1"]


def test_writing_alone_is_using_a_tier() -> None:
    now = 1000.0
    tier = Capacity(1000, lru(), division=Division({}, 500, lru))
    assert tier._shares is not None
    tier._shares._clock = lambda: now
    names = {tenant: tenant.encode().ljust(16) for tenant in "wr"}
    for tenant, namespace in names.items():
        tier.bind(namespace, tenant)
    for i in range(3):
        now += 40
        tier.add([Entry(ObjectKey(names["w"], bytes([i]) * 32), 10)], stored=True)
        tier.add([Entry(ObjectKey(names["r"], bytes([i]) * 32), 10)])  # listed, which is nobody's use
    assert {tenant: usage.share for tenant, usage in tier.tenants().items()} == {"w": 500, "r": 0}


def test_nobody_has_a_quota(serve: Any) -> None:
    engine, client = serve(NEAR)
    put(engine, engine.register(spec(), "alice"), hashes())
    assert client.get("/tenants").body == {"tenants": [], "total": 0}
    assert client.ask("PUT", "/tenants/alice", {"quotas": {"l1": "1MiB"}}).status == 422
