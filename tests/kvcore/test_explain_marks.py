"""What is recognised without token ids, by marks of them; and lookups that have no id."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explain_told import SIZE, Told, missed, opening

from kvcore.engine import Asked, Space
from kvcore.explain.compare import compare
from kvcore.explain.explain import NotOnRecord, explain_prompt, explain_request
from kvcore.explain.models import Comparison, Explanation, Question, Side
from kvcore.explain.tell import explanation
from kvcore.observe.decisions import Answer, Decisions, mark_of, salt_word
from kvcore.service import open_store
from kvcore.testing import chunks


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    with opening(tmp_path) as made:
        yield made


def asked_in_turn(told: Told, *requests: tuple[Space, list[bytes], dict[str, Any]]) -> list[Explanation]:
    """Each looks up, is explained, and is then stored, as an engine does that computes what it did not find."""
    said = []
    for number, (space, keys, more) in enumerate(requests):
        said.append(told.ask(f"r{number}", keys, space=space, **more))
        told.put(keys, space)
    return said


def test_another_salt_or_adapter_is_recognised_without_token_ids(make: Any) -> None:
    """Its hashes are others: marks of the first chunks' tokens tell, and no token id is kept for them."""
    told = make()
    ids = list(range(3 * SIZE))
    pepper = told.engine.register(chunks.spec(), "pepper")
    french = told.engine.register(replace(chunks.spec(), extra={"lora": "french:1f2e"}))
    _, plain, adapted, again, other = asked_in_turn(
        told,
        (pepper, chunks.hashes(3), {"tokens": ids, "salt": salt_word("pepper")}),
        (told.space, chunks.hashes(3, 50), {"tokens": ids}),
        (french, chunks.hashes(3, 100), {"tokens": ids, "adapter": "french"}),
        (pepper, chunks.hashes(3), {"tokens": ids, "salt": salt_word("pepper")}),
        (told.space, chunks.hashes(3, 150), {"tokens": [*ids[: SIZE - 1], 777]}),
    )
    missed(
        plain, "other_namespace", "request r0 begins with the same 32 tokens, but differs in cache salt (none here, #"
    )
    missed(
        adapted, "other_namespace", "request r1 begins with the same 32 tokens, but differs in lora (french:1f2e here"
    )
    assert again.broke is None
    missed(other, "never_stored", "no earlier request on record")
    assert not any("token ids" in note for note in plain.notes)
    said = compare(told.engine, Comparison(a=Side(request="r0"), b=Side(request="r1")))
    assert said.text.startswith("nothing: the first 32 tokens are the same, but their namespaces differ in tenant")
    record = told.engine.decisions.since()
    assert [bool(d.mark) for d in record] == [True, True, True, False, True]  # of a hit there is nothing to know
    assert not [d for d in record if d.asked.ids is not None or d.ids is not None]


def test_the_same_tokens_with_another_image(make: Any) -> None:
    told = make()
    ids = list(range(2 * SIZE))
    _, said = asked_in_turn(
        told, (told.space, chunks.hashes(2), {"tokens": ids}), (told.space, chunks.hashes(2, 50), {"tokens": ids})
    )
    missed(said, "differs", "request r0 has the same tokens, but not the same media")


def test_a_prompt_is_compared_by_its_mark(make: Any) -> None:
    told = make("keys: tokens\nl2: []\n")
    ids = list(range(2 * SIZE))
    keyed = told.engine.register(chunks.spec(), "pepper")
    asked_in_turn(told, (keyed, chunks.hashes(2), {"tokens": ids, "salt": salt_word("pepper")}))
    told.engine.clear(keyed)
    said = explain_prompt(told.engine, Question(tokens=ids)).explanations[0]
    missed(said, "other_namespace", "request r0 begins with the same 32 tokens")


def test_marks_say_nothing_without_their_key() -> None:
    ids = list(range(64))
    code = "from kvcore.observe.decisions import mark_of; print(mark_of(list(range(64))).hex())"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert mark_of(ids) == mark_of(tuple(ids)) != mark_of(ids[1:])
    assert elsewhere != mark_of(ids).hex()
    assert len(elsewhere) == 32
    assert mark_of(["no", "ids"]) == mark_of([1 << 80]) == b""  # type: ignore[list-item]


def test_a_chunk_that_was_found_leaves_no_mark() -> None:
    """And neither does a prompt without one: there is nothing to compare."""
    for hashes, found, marked in ((2, 0, True), (2, 1, False), (0, 0, False)):
        decisions = Decisions(8)
        kept = decisions.begin(Asked("r", 70, list(range(70))), b"n", chunks.hashes(hashes), 0, SIZE)
        assert kept is not None
        assert kept.asked.ids is None
        kept.answered(Answer(found, {}, {}), 0.0)
        assert bool(kept.mark) == marked
        assert kept.ids is None


def test_lookups_of_an_engine_that_names_no_requests(tmp_path: Path) -> None:
    """They go by their number, and nothing is said of what only a name would tell."""
    path, keys = tmp_path / "kvcore.yaml", chunks.hashes(4)
    path.write_text("lookup_timeout: 20s\nl2: [{name: near, storage: memory}]\n")
    store = open_store(str(path), name="sglang")
    space = store.register(chunks.spec(), "acme-page/1")
    payloads = [[memoryview(bytearray(space.layouts[0].nbytes))] for _ in keys]
    assert all(store.store(space, keys[:2], payloads[:2]))
    assert store.prefix(space, keys, asked=Asked()) == 2
    assert store.prefix(space, [*keys[:3], *chunks.hashes(1, 50)], asked=Asked()) == 2
    said = explain_request(store, "no.1").explanations[0]
    assert (said.request, said.found.chunks, said.saved.tokens, said.saved.seconds) == ("no.1", 2, None, None)
    missed(said, "never_stored", chunk=2)
    lines = dict(explanation(said))
    assert lines["request"].startswith("no.1, ")
    assert lines["saved"] == "not known: the engine does not say for which request it loads"
    assert not [note for note in said.notes if "token" in note or "taken" in note]
    second = explain_request(store, "no.2").explanations[0]
    missed(second, "never_stored", "request no.1 had asked for it", chunk=2)
    assert second.nearest is not None
    assert second.nearest.request == "no.1"
    assert compare(store, Comparison(a=Side(request="no.1"), b=Side(request="no.2"))).chunks == 3
    with pytest.raises(NotOnRecord, match=r"no request 'no\.3'"):
        explain_request(store, "no.3")
    store.close()
