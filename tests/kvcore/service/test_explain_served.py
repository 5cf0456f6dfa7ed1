"""Requests to a server are explained by what the server knows; where it is away, its engine says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, connected, until

from kvcore.cli import main
from kvcore.engine import Asked
from kvcore.explain.explain import explain_prompt, explain_request
from kvcore.explain.models import Explanation, Explanations, Question
from kvcore.testing import chunks
from kvcore.testing.servers.kvcore import KVCoreServer


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets are, of the server, too."""
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
    return folder / "run"


def ask(engine: Any, space: Any, request: str, keys: list[bytes], first: int = 0) -> int:
    lookup = engine.lookup(space, tuple(keys), first, Asked(request, len(keys) * 32))
    assert lookup.wait(30)
    answer = lookup.poll()
    engine.release(lookup)
    return int(answer)


def told(capsys: pytest.CaptureFixture[str], request: str) -> Explanation:
    assert main(["explain", request, "--json"]) == 0
    return Explanations.model_validate_json(capsys.readouterr().out).explanations[0]


def test_the_server_knows_what_became_of_objects(folder: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with KVCoreServer(folder, {**CONFIG, "l2": []}) as server:
        engine, space = connected(server)
        keys = chunks.hashes(6)
        chunks.publish(engine, space, keys)
        assert until(lambda: ask(engine, space, "stored", keys) == 6, "they are published")
        for n in range(1, 16):
            chunks.publish(engine, space, chunks.hashes(8, 100 * n))
        assert until(lambda: ask(engine, space, "evicted", keys, 2) == 2, "they are evicted")
        said = told(capsys, "evicted")
        assert said.broke is not None
        assert (said.broke.reason, said.broke.chunk, said.found.held, said.chunks) == ("evicted", 2, 2, 6)
        assert "was evicted from l1" in said.broke.text
        assert said.record.objects_since is not None  # the server's answer, not its engine's
        mine = explain_request(engine, "evicted").explanations[0]
        assert mine.record.objects_since is None
        assert mine.model == "m"
        assert mine.broke is not None
        assert (mine.broke.reason, mine.broke.remedy) == ("absent", "")
        with pytest.raises(Exception, match="explain the prompt at the server"):
            explain_prompt(engine, Question(tokens=[1]))
        engine.close()


def test_an_engine_that_has_token_ids_says_more_than_its_server(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KVCoreServer(folder, {**CONFIG, "l2": [], "inspect": {"tokens": True}}) as server:
        engine, space = connected(server)
        for request, first, odd in (("one", 0, 2), ("two", 9, 777)):
            asked = Asked(request, 64, [0, 1, odd, *range(3, 64)])
            lookup = engine.lookup(space, tuple(chunks.hashes(2, first)), 0, asked)
            assert lookup.wait(30)
            engine.release(lookup)
        said = told(capsys, "two")
        assert said.broke is not None
        assert (said.broke.reason, said.broke.chunk) == ("short_prefix", 0)
        assert "token 2 is another than in request one" in said.broke.text
        engine.close()


def test_a_server_that_is_away(folder: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with KVCoreServer(folder, CONFIG) as server:
        engine, space = connected(server)
        server.stop()
        until(lambda: engine.descriptor() is None, "it is seen that the server has gone")
        assert ask(engine, space, "lost", chunks.hashes(2)) == 0
        said = told(capsys, "lost")
        assert said.broke is not None
        assert (said.broke.reason, said.broke.remedy) == ("no_server", "start it: `kvcore serve --config FILE`")
        assert json.loads(said.model_dump_json())["found"]["misses"] == {"no_server": 2}
        engine.close()
