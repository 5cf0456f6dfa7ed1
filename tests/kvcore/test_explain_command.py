"""`kvcore explain` and `kvcore diff` as people use them, and every command of docs/explain.md with what it prints."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import explain_demo
import pytest

from kvcore.cli import main
from kvcore.cli.kit import asking
from kvcore.engine import weights_fingerprint
from kvcore.explain.models import MAX_TOKENS, DiffModel, Explanations
from kvcore.service import open_engine
from kvcore.service.inspect.client import caches
from kvcore.testing import chunks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text()
SHOWN = re.findall(r"^```console\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("explain")
        patch.setenv("KVCORE_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        patch.chdir(folder)
        with explain_demo.demo(folder):
            yield folder


def masked(text: str) -> list[str]:
    """Lines without times and numbers of processes."""
    text = re.sub(r"\d+(\.\d+)? (ms|s|min)\b", "T", text)
    text = re.sub(r"\d\d:\d\d:\d\d", "CLOCK", text)
    return [" ".join(re.sub(r"(vllm)-\d+(\.\d+)?", r"\1-PID", line).split()) for line in text.splitlines()]


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", SHOWN, ids=lambda text: text.splitlines()[0][2:40])
def test_the_page_shows_what_is_printed(place: Path, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, *lines = shown.splitlines()
    words = shlex.split(first.removeprefix("$ "))
    assert words[0] == "kvcore"
    assert masked(said(capsys, *words[1:])) == masked("\n".join(lines))


def test_the_page_shows_each_command() -> None:
    assert len(SHOWN) >= 4
    assert {shlex.split(s)[2] for s in SHOWN} == {"explain", "diff"}


def test_every_reason_is_on_the_page() -> None:
    from typing import get_args

    from kvcore.explain.models import Reason

    for reason in get_args(Reason):
        assert f"`{reason}`" in PAGE, reason


def test_every_counted_reason_is_on_the_page() -> None:
    from kvcore.explain.words import BROKE

    bridge = PAGE.split("## Counted and explained")[1].split("\n## ")[0]
    counted = "".join(row.split("|")[1] for row in bridge.splitlines() if row.startswith("| "))
    assert not [word for word in ("absent", *BROKE) if f"`{word}`" not in counted]


def test_the_pages_command_over_http(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The command asks whom `--url` names, with the token of the environment: here the same routes without a server."""
    (command,) = re.findall(r"^    (kvcore explain .*--url .*)$", PAGE, re.M)
    asked = []

    def ask(cache: Any, path: str, body: Any = None) -> Any:
        asked.append((cache.url, cache.token, path))
        return real(caches()[0], path, body)

    real = asking.ask
    monkeypatch.setattr(asking, "ask", ask)
    monkeypatch.setenv("KVCORE_SERVER__HTTP__TOKEN", "a token of the page")
    assert "chatcmpl-93-0" in said(capsys, *shlex.split(command)[1:])
    assert [a[:2] for a in asked] == [("http://127.0.0.1:7601", "a token of the page")] * 3
    assert [a[2] for a in asked] == ["/requests?limit=1", "/explain?request=chatcmpl-93-0", "/status"]


# -- more of it --------------------------------------------------------------------------------------------------------


def test_json_is_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Explanations.model_validate_json(said(capsys, "explain", "93", "--json"))
    assert found.explanations[0].request == "chatcmpl-93-0"
    assert DiffModel.model_validate_json(said(capsys, "diff", "81", "93", "--json")).tokens == 122
    rows = json.loads(said(capsys, "explain", "--json"))["requests"]
    assert [r["id"] for r in rows] == ["chatcmpl-81-0", "chatcmpl-93-0"]


def test_the_last_request(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "chatcmpl-93-0" in said(capsys, "explain", "last")


def test_token_ids_instead_of_text(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    ids = explain_demo.ids(place / "qwen3", explain_demo.TUESDAY)
    (place / "ids.json").write_text(json.dumps(ids))
    assert "4 of 4 chunks" in said(capsys, "explain", "--prompt-file", "ids.json")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ids)))
    assert "4 of 4 chunks" in said(capsys, "explain", "--prompt-file", "-")
    assert "the first 130 tokens" in said(capsys, "diff", "@ids.json", "93")


def test_two_prompts_without_a_cache(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("KVCORE_RUN_DIR", str(tmp_path / "run"))
    out = said(capsys, "diff", "@monday.txt", "@tuesday.txt", "--model", "qwen3")
    assert "the first 122 tokens; how many chunks that is, a running cache says, or --chunk-tokens N" in out
    assert "the first 1 token;" in said(capsys, "diff", "--text", "Today is", "Today Monday", "--model", "qwen3")
    out = said(capsys, "diff", "--text", "Today is Monday", "Today is", "--model", "qwen3", "--chunk-tokens", "2")
    assert "the first 2 tokens: 1 whole chunk of 2, so 2 are reused" in out
    assert "(the prompt ends here)" in out
    out = said(capsys, "explain", "93", status=1)
    assert "no cache of this user is open on this machine" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["explain", "nobody"], "no request 'nobody' is among the 2 lookups on record"),
        (["explain", "93", "--prompt", "x"], "give a request or a prompt, not both"),
        (["explain", "--prompt", "x"], "--model is missing"),
        (["explain", "--prompt", "x\udcff", "--model", "qwen3"], "the prompt is no text in UTF-8"),
        (["explain", "x\udcff"], "no request"),
        (["explain", "--prompt", "x", "--model", "nowhere/at/all"], "it is no folder, and the hub's cache"),
        (["explain", "--prompt-file", "absent.txt"], "absent.txt: No such file or directory"),
        (["explain", "93", "--cache", "other"], "--cache other: there are vllm-"),
        (["explain", "93", "--salt", "s"], "--salt says more of a prompt, and none is given: leave it out"),
        (["explain", "--tenant", "t"], "--tenant says more of a prompt"),
        (["pin", "01234567", "--for", "1h", "--chat"], "--chat says more of a prompt"),
        (["explain", "--prompt", "Rule 1", "--model", "qwen3", "--salt", "s"], "nobody has asked for this model as"),
        (["diff", "81", "nobody"], "no request 'nobody'"),
        (["diff", "81", "93", "--chunk-tokens", "0"], "--chunk-tokens 0: write a number of at least 1"),
        (["explain", "93", "--url", "http://127.0.0.1:1"], "is gone"),
    ],
    ids=lambda v: None if isinstance(v, list) else v[:24],
)
def test_what_is_wrong_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert text in said(capsys, *words, status=1)


def test_words_of_others_do_not_reach_the_terminal_raw(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RUN_DIR", str(tmp_path / "run"))
    evil = "\x1b[2J\r\n\x9b31m\u202ex"
    with closing(open_engine(str(place / "kvcore.yaml"), name="evil")) as engine:
        space = engine.register(replace(chunks.spec(), model=evil))
        for request in ("A" * 1000, f"0{evil}", f"1{evil}"):
            explain_demo.serve(engine, space, request, list(range(100)))
        for words in (["explain"], ["explain", "last"], ["explain", "0"], ["explain", "1"], ["diff", "0\x1b", "1\x1b"]):
            out = said(capsys, *words)
            assert not [line for line in out.split("\n") if not line.isprintable()], words
            assert "?[2J???31m?x" in out, words
            assert max(map(len, out.split("\n"))) < 500, words
            assert said(capsys, *words, "--json").isascii(), words
        assert "?[2J" in said(capsys, "explain", "--prompt", "x", "--model", evil, status=1)


def test_a_cache_that_hangs_holds_up_nobody(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "LATE_S", 0.3)
    with socket.socket(socket.AF_UNIX) as hangs:
        path = Path(os.environ["KVCORE_RUN_DIR"]) / "hung-1.sock"
        hangs.bind(str(path))
        hangs.listen(8)
        try:
            for words in (["explain"], ["explain", "81"], ["record", str(tmp_path / "t"), "--past", "--seconds", "0"]):
                assert main(words) == 0
                told = capsys.readouterr()
                assert "hung-1 has not answered for" in told.err, words
                assert "left out" in told.err, words
                assert "vllm" in told.out, words
        finally:
            path.unlink()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", [b"<html>hi</html>", b"{oops", b"[1]", b"\xff\xfe{", b"{}", b'{"requests": [7]}'])
def test_what_is_no_kvcore_is_told_to_be_none(
    body: bytes, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if body[:1] == b"<" else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        where = f"127.0.0.1:{server.server_port}"
        record = ["record", str(tmp_path / "t"), "--seconds", "0"]
        for words in (
            ["explain"],
            ["explain", "last"],
            ["explain", "x"],
            ["diff", "a", "b"],
            ["top", "--once"],
            record,
        ):
            assert main([*words, "--url", where]) == 1, words
            told = capsys.readouterr()
            assert where in told.err + told.out, words
            assert status == 500 or re.search("is no kvcore|not understood", told.err + told.out), words
        server.shutdown()


@contextmanager
def alone(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "vllm") -> Iterator[Any]:
    """A cache, and no other to be asked."""
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.setenv("KVCORE_RUN_DIR", str(folder / "run"))
    (folder / "kvcore.yaml").write_text("l1: {size: 8MiB}\nmin_object_size: 128KiB\nkeys: tokens\nl2: []\n")
    with closing(open_engine(str(folder / "kvcore.yaml"), name=name)) as engine:
        yield engine


def test_the_only_model_that_is_served_needs_not_be_named(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "qwen3"
    shutil.copytree(place / "qwen3", model)
    (model / "model.bin").write_bytes(b"w" * 5000)
    with alone(tmp_path, monkeypatch) as engine:
        spec = replace(chunks.spec(weights_fingerprint(str(model))), model="qwen3")
        explain_demo.serve(engine, engine.register(spec), "r", explain_demo.ids(model, explain_demo.MONDAY))
        assert "4 of 4 chunks; there now: 4 in l1" in said(capsys, "explain", "--prompt", explain_demo.MONDAY)
        out = said(capsys, "diff", "--text", "Today is Monday", "Today is Tuesday")
        assert "then 'Monday'" in out
        engine.register(replace(spec, model="other"))
        assert "--model is missing" in said(capsys, "explain", "--prompt", "Today", status=1)


def test_lookups_without_an_id_are_listed_and_explained_by_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(tmp_path, monkeypatch, "sglang") as engine:
        space = engine.register(chunks.spec())
        for _ in range(2):
            explain_demo.serve(engine, space, "", list(range(100)))
        assert [line.split()[1] for line in said(capsys, "explain").splitlines()[1:3]] == ["no.1", "no.2"]
        assert "no.2, " in said(capsys, "explain", "last")
        assert "never_stored" in said(capsys, "explain", "no.1", "--json")
        assert "the first" not in said(capsys, "diff", "no.1", "no.2")


def test_prompts_that_are_too_long_or_empty(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = json.dumps([1] * (MAX_TOKENS + 1))
    (place / "many.json").write_text(many)
    words = "the prompt has 2,097,153 tokens: of one with more than 2,097,152 nothing can be told"
    for command in (["explain", "--prompt-file", "many.json"], ["diff", "@many.json", "93"]):
        assert words in said(capsys, *command, status=1)
    with pytest.raises(asking.Refusal, match=words):
        asking.ask(caches()[0], "/explain", {"tokens": [1] * (MAX_TOKENS + 1)})
    monkeypatch.chdir(place)
    assert "nothing: both are empty" in said(capsys, "diff", "--text", "", " ", "--model", "qwen3")
    assert "nothing: one of them is empty" in said(capsys, "diff", "--text", "", "Today", "--model", "qwen3")


@pytest.mark.parametrize("words", [["explain", "--prompt-file", "-"], ["diff", "@-", "93"], ["simulate", "-"]])
def test_input_that_is_closed_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed: send what is to be read there" in said(capsys, *words, status=1)


def test_input_that_is_no_text_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "- is no text in UTF-8" in said(capsys, "explain", "--prompt-file", "-", status=1)
