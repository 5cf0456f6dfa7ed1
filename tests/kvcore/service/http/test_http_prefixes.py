"""The prefix tree, the configuration and explanations over HTTP."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from http_client import TOKEN
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine import Asked
from kvcore.observe import Decision
from kvcore.observe.decisions import NOBODY
from kvcore.service.http.prefixes import joined, tree
from kvcore.testing.chunks import hashes, put, spec

SHORT = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


def chain(words: Sequence[object]) -> list[bytes]:
    """Hashes of chunks with this content: each stands for all before it."""
    found, before = [], b""
    for word in words:
        before = hashlib.sha256(before + repr(word).encode()).digest()
        found.append(before)
    return found


def decision(keys: Sequence[bytes], begin: int = 0, at: float = 0.0) -> Decision:
    return Decision(NOBODY, b"n" * 16, keys, begin, 16, begin, at)


@given(SHORT)
def test_the_branches_hold_every_prefix_once_with_all_requests_that_have_it(prompts: list[list[int]]) -> None:
    requests = sorted(joined(decision(chain(p)) for p in prompts if p))
    branches = tree(requests)
    counted: dict[bytes, int] = {}
    for branch in branches:
        for chunk in requests[branch.low].hashes[branch.first : branch.end]:
            assert chunk not in counted
            counted[chunk] = branch.high - branch.low
        assert branch.parent is None or branch.parent.end == branch.first
        assert (branch.parent is None) == (branch.first == 0)
    assert [b.parent is None or b.parent in branches[:i] for i, b in enumerate(branches)] == [True] * len(branches)
    wanted: dict[bytes, int] = {}
    for prompt in prompts:
        for chunk in chain(prompt):
            wanted[chunk] = wanted.get(chunk, 0) + 1
    assert counted == wanted


def test_what_an_engine_held_itself_is_joined_where_another_request_had_it() -> None:
    whole, other = chain("abcdef"), chain("xyz")
    found = joined([decision(whole[4:], 4), decision(whole[:5]), decision(other[2:], 2)])
    assert sorted((r.begin, len(r.hashes)) for r in found) == [(0, 5), (0, 6), (2, 1)]
    assert [r.hashes for r in found if len(r.hashes) == 6] == [whole]


def test_a_tree_says_what_is_where(serve: Any) -> None:
    engine, client = serve()
    space = engine.register(spec())
    shared, left, right = hashes(3), hashes(2, 10), hashes(4, 20)
    put(engine, space, shared + left)
    for tail in (left, right):
        engine.release(engine.lookup(space, [*shared, *tail], 0, Asked("one", 999)))
    put(engine, space, hashes(2, 90))
    found = client.get("/prefixes").body
    assert (found["namespace"], found["requests"], found["cut"]) == (space.namespace.hex(), 2, 0)
    nbytes = space.groups[0].nbytes
    said = {(n["parent"], n["first"], n["chunks"], n["requests"], n["resident"], n["nbytes"]) for n in found["nodes"]}
    assert said == {(None, 0, 3, 2, 3, 3 * nbytes), (0, 3, 2, 1, 2, 2 * nbytes), (0, 3, 4, 1, 0, 0)}
    assert (found["other_objects"], found["other_bytes"]) == (2, 2 * nbytes)
    assert [n["model"] for n in found["namespaces"]] == ["m"]
    cut = client.get(f"/prefixes?limit=1&namespace={space.namespace.hex()}").body
    assert ([n["chunks"] for n in cut["nodes"]], cut["cut"]) == ([3], 2)
    assert client.get(f"/prefixes?namespace={'0' * 32}").body["nodes"] == []
    assert client.get("/prefixes?namespace=x").status == 422


def test_nothing_on_record_and_no_record(serve: Any) -> None:
    _, client = serve()
    assert client.get("/prefixes").body["requests"] == 0
    _, client = serve(more="l1: {size: 8MiB}\ninspect: {requests: 0}")
    assert client.get("/prefixes").body["requests"] is None


def test_the_configuration_has_its_sources_and_no_secret(serve: Any) -> None:
    _, client = serve(
        more="l1: {size: 8MiB}\nsalt: pepper\n"
        f"server: {{url: unix:///tmp/x, http: {{listen: '127.0.0.1:0', token: {TOKEN}}}}}"
    )
    found = client.get("/config").body
    values = {v["path"]: v for v in found["values"]}
    assert values["l1.size"]["value"] == "8MiB"
    assert values["l1.size"]["source"] == {"kind": "file", "name": found["file"], "line": 4, "column": 12}
    assert values["l1.eviction"]["source"]["kind"] == "default"
    assert "server.http.token" in values
    assert values["salt"]["value"] == "**********"
    assert TOKEN not in json.dumps(found)
    assert "pepper" not in json.dumps(found)


def test_a_request_and_a_prompt_are_explained(serve: Any) -> None:
    engine, client = serve()
    space = engine.register(spec())
    put(engine, space, hashes(3))
    engine.release(engine.lookup(space, hashes(5), 0, Asked("chatcmpl-one", 200)))
    (told,) = client.get("/explain?request=one").body["explanations"]
    assert (told["request"], told["found"]["chunks"], told["broke"]["chunk"]) == ("chatcmpl-one", 3, 3)
    answer = client.get("/explain?request=nobody")
    assert (answer.status, answer.body["type"]) == (404, "urn:kvcore:no-request")
    asked = {"hashes": [h.hex() for h in hashes(4)], "namespace": space.namespace.hex()}
    (now,) = client.post("/explain", asked).body["explanations"]
    assert now["now"]["chunks"] == 3
    engine.release(engine.lookup(space, hashes(5), 0, Asked("chatcmpl-two", 200)))
    same = client.post("/diff", {"a": {"request": "chatcmpl-one"}, "b": {"request": "chatcmpl-two"}})
    assert (same.status, same.body["chunks"]) == (200, 5)
    itself = client.post("/diff", {"a": {"request": "chatcmpl-one"}, "b": {"request": "one"}})
    assert (itself.status, "A and B are one request" in itself.body["detail"]) == (422, True)
