"""`kvcore bench engine`: what is asked, what is heard, and that the numbers mean what they say."""

import argparse
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_parrot import TOKENS_PER_WORD, Parrot, parrot

from kvcore.api import ConfigError
from kvcore.cli import main
from kvcore.testing.servers import free_port, listens
from kvcore_bench.speed.engine import add_arguments
from kvcore_bench.speed.engine.client import Answer, Api
from kvcore_bench.speed.engine.counters import behind_share, counts, increase, reused_share
from kvcore_bench.speed.engine.drive import Done, Round, drive
from kvcore_bench.speed.engine.subjects import EngineError, Vllm, given
from kvcore_bench.speed.engine.summary import Result, cost, numbers, percentile, spread
from kvcore_bench.speed.engine.texts import Ruler, Texts, measured
from kvcore_bench.speed.engine.workloads import WORKLOADS, Ask, LongDocQA, MultiRoundChat, SharedPrefix, Workload

PAGE = (Path(__file__).parents[2] / "docs" / "bench-engine.md").read_text()
HELLO = [{"role": "user", "content": "hello there"}]
TEXTS = Texts("seed", Ruler())


@pytest.fixture(autouse=True)
def counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_bench.speed.engine.measuring.COUNTED_S", 0.0)


@pytest.fixture
def bird() -> Iterator[Parrot]:
    with parrot() as server:
        yield server


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_defaults_are_those_that_are_published() -> None:
    qa, chat, prefix = LongDocQA(), MultiRoundChat(), SharedPrefix()
    assert (qa.length, qa.questions, qa.order, qa.inflight, qa.output) == (10_000, 2, "random", 3, 128)
    assert (chat.users, chat.turns, chat.qps, chat.system, chat.history, chat.output) == (10, 5, 0.5, 1000, 2000, 100)
    assert (prefix.length + prefix.question, prefix.length / (prefix.length + prefix.question)) == (8000, 0.8)


@pytest.mark.parametrize(
    "workload", [LongDocQA(documents=3, length=50), SharedPrefix(prefixes=3, requests=3, length=50)]
)
def test_everything_is_new_once_and_then_known(workload: Workload) -> None:
    first, again = workload.rounds(TEXTS)
    assert {a.phase for a in first} == {"first"}
    assert {a.phase for a in again} == {"again"}
    begins = [a.says.split("\n\n")[0] for a in first]
    assert len(set(begins)) == 3
    assert len({b.split()[0:4].__str__() for b in begins}) == 3, "they differ from their first words on"
    assert Counter(a.says.split("\n\n")[0] for a in again) == dict.fromkeys(begins, 2)
    assert len({a.says for a in first + again}) == 9, "no prompt comes twice"


def test_order() -> None:
    tiled = LongDocQA(documents=4, length=20, order="tile").rounds(TEXTS)[1]
    shuffled = LongDocQA(documents=4, length=20).rounds(TEXTS)[1]
    assert tiled != shuffled
    assert sorted(tiled) == sorted(shuffled)
    assert shuffled == LongDocQA(documents=4, length=20).rounds(TEXTS)[1], "the same for every server"


def test_users_share_a_beginning_and_ask_in_turn() -> None:
    (asks,) = MultiRoundChat(users=2, turns=3, system=30, history=20, qps=4).rounds(TEXTS)
    assert [a.talk for a in asks] == [0, 1] * 3
    assert [a.phase for a in asks] == ["first"] * 2 + ["again"] * 4
    assert [a.due_s for a in asks] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    begins = [a.says.split("\n\n") for a in asks[:2]]
    assert begins[0][0] == begins[1][0]
    assert begins[0][1] != begins[1][1]
    assert len({a.says for a in asks}) == 6


def test_texts_have_the_wanted_number_of_tokens() -> None:
    ruler = measured("s", lambda text: 30 + 3 * len(text.split()))  # 30: a chat template
    assert ruler == Ruler(3.0, measured=True)
    assert len(Texts("s", ruler).text("a", 600).split()) == 200
    assert measured("s", lambda text: None) == Ruler(1.0, measured=False)
    assert Texts("s", ruler).text("a", 60) == Texts("s", ruler).text("a", 60) != Texts("t", ruler).text("a", 60)


# -- what is heard -----------------------------------------------------------------------------------------------------


def test_a_streamed_answer(bird: Parrot) -> None:
    api = Api(bird.url, "parrot", key="secret", more={"ignore_eos": True})
    answer = api.ask(HELLO, 3)
    assert (answer.text, answer.error) == ("squawk squawk squawk", "")
    assert (answer.prompt, answer.output, answer.cached) == (2 * TOKENS_PER_WORD, 3, 0)
    assert answer.first_s is not None
    assert 0 < answer.first_s <= answer.whole_s
    assert len(answer.gaps_s) == 2
    assert answer.first_s + sum(answer.gaps_s) <= answer.whole_s
    assert api.ask(HELLO, 3).cached == 2 * TOKENS_PER_WORD
    sent = bird.requests[0]
    assert (sent["path"], sent["messages"], sent["ignore_eos"]) == ("/v1/chat/completions", HELLO, True)
    assert (sent["temperature"], sent["stream"], sent["max_tokens"]) == (0, True, 3)
    assert bird.headers[0]["authorization"] == "Bearer secret"


def test_completions_take_a_conversation_as_one_text(bird: Parrot) -> None:
    api = Api(f"{bird.url}/v1/", chat=False)
    assert api.find_model() == "parrot"
    said = [*HELLO, {"role": "assistant", "content": "squawk"}, {"role": "user", "content": "really?"}]
    assert api.ask(said, 2).text == "squawk squawk"
    assert bird.requests[0]["path"] == "/v1/completions"
    assert bird.requests[0]["prompt"] == "hello there\n\nassistant: squawk\n\nuser: really?"
    assert "authorization" not in bird.headers[0]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("REFUSE", "400: too long for this bird"),
        ("QUARREL", "no more seeds"),
        ("FAINT", "the stream ended before the answer did"),
    ],
)
def test_what_goes_wrong_is_said(bird: Parrot, word: str, error: str) -> None:
    answer = Api(bird.url, "parrot").ask([{"role": "user", "content": f"hello {word}"}], 4)
    assert error in answer.error


def test_a_first_token_may_be_a_thought_or_have_no_text(bird: Parrot) -> None:
    api = Api(bird.url, "parrot")
    assert api.ask([{"role": "user", "content": "THINK"}], 3).text == "squawk squawk squawk"
    silent = api.ask([{"role": "user", "content": "SILENT"}], 3)
    assert (silent.error, silent.text, silent.gaps_s) == ("", "", ())
    assert silent.first_s is not None


def test_a_server_that_is_not_there(bird: Parrot) -> None:
    assert "refused" in Api(f"127.0.0.1:{free_port()}", "m").ask(HELLO, 1).error
    for url in ("ftp://host", "http://", "http://host:port", "http://[", "foo", ""):
        with pytest.raises(ConfigError, match="write http://"):
            Api(url)


@pytest.mark.parametrize("url", ["http://me:secret@host", "me:secret@host:1", "ftp://me:secret@h", "x=http://secret@["])
def test_a_password_is_not_repeated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "long-doc-qa", "--url", url]) == 1
    assert "USER:PASSWORD@ is not taken" in (said := "".join(capsys.readouterr()))
    assert "secret" not in said


DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


@contextmanager
def raw(*sends: bytes, then: bytes = b"", every_s: float = 0.0) -> Iterator[str]:
    """A server that answers anything with these bytes, and then with `then` for ever, or with its end."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(b"".join(sends))
                while then:
                    self.wfile.write(then)
                    time.sleep(every_s)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while then:
                    self.wfile.write(then)
                    time.sleep(every_s)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_an_answer_without_a_token_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with raw(DONE) as url:
        assert "no token came" in Api(url, "m").ask(HELLO, 1).error
        assert main(["bench", "engine", "long-doc-qa", "--url", url, "--model", "m"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no token came" in err


@pytest.mark.parametrize("told", ['"x"', "-1", "true", "null", "[]"])
def test_numbers_that_are_none_were_not_told(told: str) -> None:
    details = f'"prompt_tokens_details": {{"cached_tokens": {told}}}'
    usage = f'data: {{"usage": {{"prompt_tokens": {told}, "completion_tokens": {told}, {details}}}}}\n\n'
    for said in (usage, f'data: {{"usage": {told}}}\n\n'):
        with raw(TOKEN, said.encode(), DONE) as url:
            answer = Api(url, "m").ask(HELLO, 1)
        assert (answer.error, answer.text) == ("", "a")
        assert (answer.prompt, answer.output, answer.cached) == (None, None, None)
        assert numbers([Round([done("first", answer)], 1.0)]).output == 1


@pytest.mark.parametrize("choices", ["3", "[3]", '[{"text": 3}]', '[{"delta": "x"}]', "[" * 100_000])
def test_events_of_another_shape_are_an_error(choices: str) -> None:
    with raw(f'data: {{"choices": {choices}}}\n\n'.encode(), DONE) as url:
        assert "not as the API has it" in Api(url, "m").ask(HELLO, 1).error


def test_a_line_without_end_is_cut() -> None:
    with raw(b"data: ", then=b"x" * 65536) as url:
        assert "a line of the stream has more than 1 MiB" in Api(url, "m", timeout_s=60).ask(HELLO, 1).error


@pytest.mark.parametrize("then", [b"x", TOKEN])
def test_a_request_has_an_end(then: bytes) -> None:
    """Also where there is always a sign."""
    with raw(then=then, every_s=0.01) as url:
        begun = time.monotonic()
        assert "no whole answer within 0.5 s" in Api(url, "m", timeout_s=0.5).ask(HELLO, 1).error
        with pytest.raises(OSError, match=r"no whole answer within 0\.5 s"):
            Api(url).read("/metrics", 0.5)
        assert 1.0 <= time.monotonic() - begun < 30


# -- how it is asked ---------------------------------------------------------------------------------------------------


def ask(phase: Any = "again", says: str = "x", talk: int | None = None) -> Ask:
    return Ask(phase, says, 1, talk)


def test_so_many_at_once_and_no_more(bird: Parrot) -> None:
    bird.gate = threading.Barrier(3)  # nobody is answered before three are there
    api = Api(bird.url, "parrot")
    done = drive([ask(says=f"{i}") for i in range(9)], api.ask, 3, lambda _: None).done
    assert [d.answer.error for d in done] == [""] * 9
    assert bird.most == 3


def test_a_conversation_goes_on_with_its_own_answers() -> None:
    heard: list[list[str]] = []

    def send(said: Sequence[dict[str, str]], _: int) -> Answer:
        heard.append([m["content"] for m in said])
        return Answer(error="no") if said[-1]["content"] == "bad" else Answer(text=f"to {said[-1]['content']}")

    asks = [ask(says="a", talk=1), ask(says="b", talk=2), ask(says="bad", talk=1), ask(says="c", talk=1), ask(says="d")]
    done = drive(asks, send, 8, lambda _: None).done
    assert sorted(heard) == [["a"], ["a", "to a", "bad"], ["a", "to a", "c"], ["b"], ["d"]]
    assert [d.answer.error for d in done].count("no") == 1


def test_nobody_asks_before_it_is_due() -> None:
    asks = [Ask("again", "x", 1, None, 0.05 * i) for i in range(4)]
    done = drive(asks, lambda *_: Answer(), 8, lambda _: None).done
    assert all(d.begun_s >= d.ask.due_s for d in done)


# -- the numbers -------------------------------------------------------------------------------------------------------


def answered(first_s: float, *, prompt: int = 100, cached: int | None = 0, gaps: tuple[float, ...] = ()) -> Answer:
    return Answer("x", first_s + sum(gaps), first_s, gaps, prompt, 1 + len(gaps), cached)


def done(phase: Any, answer: Answer, begun_s: float = 0.0) -> Done:
    return Done(ask(phase), begun_s, answer)


def test_numbers_of_a_phase() -> None:
    found = numbers(
        [
            Round([done("first", answered(1.0, gaps=(0.1, 0.3))), done("first", answered(3.0), 2.0)], 9.0),
            Round([done("first", Answer(error="no")), done("first", answered(2.0, cached=50))], 9.0),
        ]
    )
    assert (found.requests, found.failed, found.seconds) == (4, 1, 5.0 + 2.0)
    assert found.ttft is not None
    assert (found.ttft.least, found.ttft.p50, found.ttft.most) == (1.0, 2.0, 3.0)
    assert found.itl is not None
    assert (found.itl.mean, found.itl.p50) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (found.prompt, found.computed, found.reused, found.output) == (300, 250, 50, 5)
    assert found.reused_share == pytest.approx(1 / 6)


def test_a_server_that_does_not_say_what_it_reused() -> None:
    found = numbers([Round([done("again", answered(1.0, cached=None))], 1.0)])
    assert (found.reused, found.computed, found.reused_share) == (None, None, None)
    assert numbers([]).ttft is None


def test_cost_of_a_token() -> None:
    first = numbers([Round([done("first", answered(0.2)), done("first", answered(0.4))], 1.0)])
    again = numbers([Round([done("again", answered(0.06, cached=90))], 1.0)])
    found = cost(first, again)
    assert found.computed_us == pytest.approx(3000)  # 0.6 s for 200
    assert found.reused_us == pytest.approx((60_000 - 10 * 3000) / 90)
    assert cost(numbers([]), again) == (None, None)
    half = numbers([Round([done("again", answered(0.06, cached=49))], 1.0)])
    assert cost(first, half).reused_us is None, "it would be noise"


def test_percentiles_lie_between_neighbours() -> None:
    values = [float(i) for i in range(11)]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == pytest.approx([0, 5, 9, 9.9, 10])
    assert percentile([7.0], 99) == 7.0
    assert spread([]) is None


def test_counters(bird: Parrot) -> None:
    api = Api(bird.url, "parrot")
    before = counts(api)
    api.ask(HELLO, 1)
    api.ask(HELLO, 1)
    found = increase(before, counts(api))
    both = 4 * TOKENS_PER_WORD
    assert found == {
        "vllm:prompt_tokens_total": both,
        "vllm:prompt_tokens_cached_total": both / 2,
        'vllm:prompt_tokens_by_source_total{source="local"}': both / 2,
    }
    assert reused_share(found) == 0.5
    assert reused_share({}) is None
    sglang = {'sglang:prompt_tokens_total{is_streaming="true"}': 8.0}
    assert reused_share(sglang) == 0.0
    sources = {f'sglang:cached_tokens_total{{cache_source="{s}"}}': 2.0 for s in ("device", "host")}
    assert reused_share({**sglang, **sources}) == 0.5
    own, behind = (
        f'vllm:prompt_tokens_by_source_total{{source="{s}"}}' for s in ("local_cache_hit", "external_kv_transfer")
    )
    assert behind_share({own: 1.0, behind: 3.0}) == 0.75
    assert behind_share(found) is None
    with parrot(metrics=False) as other:
        assert counts(Api(other.url)) == {}


# -- the command -------------------------------------------------------------------------------------------------------

SMALL = {
    "long-doc-qa": ["--documents", "3", "--length", "400", "--output", "4"],
    "multi-round-chat": [
        "--users",
        "3",
        "--turns",
        "3",
        "--system",
        "100",
        "--history",
        "200",
        "--qps",
        "100",
        "--output",
        "4",
    ],
    "shared-prefix": ["--prefixes", "2", "--requests", "3", "--length", "300", "--question", "60"],
}


@pytest.mark.parametrize("name", SMALL)
def test_json_of_each_workload(name: str, bird: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    # Of any seed and server name, but two in some hundred texts begin with the same word.
    assert main(["bench", "engine", name, "--url", f"bird={bird.url}", *SMALL[name], "--seed", "one", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"machine", "workload", "seed", "repeat", "tokens_per_word", "subjects"}
    assert found["workload"]["name"] == name
    assert found["tokens_per_word"] == TOKENS_PER_WORD
    (subject,) = found["subjects"]
    first, again = subject["phases"]["first"], subject["phases"]["again"]
    assert first["failed"] == again["failed"] == 0
    assert first["requests"] + again["requests"] == subject["all"]["requests"] == len(subject["requests"])
    if name != "multi-round-chat":
        assert first["reused_share"] == 0
        assert 300 <= first["prompt_tokens"] / first["requests"] <= 450
    assert again["reused_share"] > 0.7
    assert again["reused_tokens"] == sum(r["reused_tokens"] for r in subject["requests"] if r["phase"] == "again")
    assert subject["cost"]["computed_us"] > 0
    assert first["ttft_s"]["least"] <= first["ttft_s"]["p50"] <= first["ttft_s"]["most"]
    assert subject["counters"]["vllm:prompt_tokens_total"] >= subject["all"]["prompt_tokens"]


def test_the_table_and_the_picture(bird: Parrot, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "spread.svg"
    with parrot() as other:
        words = ["--url", f"here={bird.url}", "--url", f"<there>={other.url}", "--repeat", "2", "--plot", str(picture)]
        assert main(["bench", "engine", "shared-prefix", *SMALL["shared-prefix"], *words]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("here ", "<there> "))]
    assert [(r[0], r[1], r[2]) for r in rows] == [
        ("here", "first", "4"), ("here", "again", "8"), ("<there>", "first", "4"), ("<there>", "again", "8")
    ]  # fmt: skip
    assert [r[-2:] for r in rows[:2]] == [["1.00", "x"]] * 2
    root = ElementTree.fromstring(picture.read_text())
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2 * (2 + 1), "TTFT of two phases and ITL, of two servers"
    for line in lines:
        points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        assert points == sorted(points, key=lambda p: (p[0], -p[1])), "a share never falls"
        assert points[-1][1] == 74, "all of them have come at the end"
    assert "<there>" in [e.text for e in root.iter() if e.text]


def test_what_a_server_does_not_tell(capsys: pytest.CaptureFixture[str]) -> None:
    with parrot(details=False) as bird:
        assert main(["bench", "engine", "shared-prefix", "--url", bird.url, *SMALL["shared-prefix"]]) == 0
    assert "do not say what was reused; its counters say " in capsys.readouterr().out
    with parrot(usage=False, metrics=False) as bird:
        assert main(["bench", "engine", "shared-prefix", "--url", bird.url, *SMALL["shared-prefix"]]) == 0
    out = capsys.readouterr().out
    assert "nor do its counters" in out
    assert "lengths are in words" in out


def test_failed_requests_are_a_failed_run(bird: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    real = bird.hear
    bird.hear = lambda words: 1 // 0 if len(words) > 600 else real(words)  # type: ignore[method-assign]
    bird.handle_error = lambda *_: None  # type: ignore[method-assign]
    assert main(["bench", "engine", "long-doc-qa", "--url", bird.url, "--documents", "2", "--length", "2000"]) == 1
    out, err = capsys.readouterr()
    assert "6 of 6 requests failed; they are in no number" in out
    assert "a request failed: " in err


def test_what_cannot_be_measured(bird: Parrot, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, status: int = 1) -> str:
        assert main(["bench", *words]) == status
        return capsys.readouterr().err

    assert "--url of a server that runs, or --vllm" in said("engine", "long-doc-qa")
    assert "--url of a server that runs, or --vllm" in said("engine", "long-doc-qa", "--url", bird.url, "--vllm", "m")
    assert "belong to --vllm" in said("engine", "long-doc-qa", "--url", bird.url, "--", "--dtype", "float32")
    assert "does not answer" in said("engine", "long-doc-qa", "--url", f"http://127.0.0.1:{free_port()}")
    assert "two servers are called 'a'" in said("engine", "shared-prefix", "--url", "a=h:1", "--url", "a=h:2")
    assert "belong to `kvcore bench` without" in said("--quick", "engine", "shared-prefix", "--url", bird.url)
    assert "words behind `--`" in said("--", "serve")
    assert "--with nothing: write one of plain," in said("engine", "long-doc-qa", "--vllm", "m", "--with", "nothing")
    assert "at least 1" in said("engine", "long-doc-qa", "--documents", "0", "--url", bird.url, status=2)
    assert "behind `--`" in said("engine", "long-doc-qa", "--dtype", "float32", "--url", bird.url, status=2)
    for name, why in (("a.png", "does not end with .svg"), ("none/a.svg", "there is no folder")):
        assert why in said("engine", "long-doc-qa", "--plot", str(tmp_path / name), "--url", bird.url, status=2)


def vllm(tmp_path: Path, **more: Any) -> Vllm:
    return Vllm("some/model", ["--dtype", "float32"], 3 << 30, tmp_path, 60.0, lambda _: None, lambda: None, **more)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "none.yaml"], "none.yaml"),
        (["--set", "l1.sise=1GiB"], "l1.sise"),
        (["--with", "plain", "--with", "x='"], "--with x='"),
        (["--with", "plain", "--with", "lmcache", "--lmcache", "./none"], "no command './none'"),
    ],
)
def test_nothing_is_started_before_all_is_known_to_be_right(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "engine", "long-doc-qa", "--vllm", "none", "--logs", "logs", *words]) == 1
    assert says in (err := capsys.readouterr().err)
    assert "starting" not in err
    assert not list(tmp_path.glob("logs/*"))


def test_the_ways_in_which_vllm_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("plain", "kvcore", "offloading", "lmcache", "mine=--seed 5")
    monkeypatch.chdir(tmp_path)
    Path("kvcore.yaml").write_text("l2: []\n")
    made = vllm(
        tmp_path, config="kvcore.yaml", values={"chunk_tokens": "128"}, lmcache=["/bin/lmc", "--chunk-size", "9"]
    )
    plain, kvcore, offloading, lmcache, mine = (subject.command for subject in made.ways(ways))
    shared = " --dtype float32 --served-model-name model --host 127.0.0.1 --enable-prompt-tokens-details"
    assert plain.endswith(f" --model some/model{shared}")
    file = Path("kvcore.yaml").absolute()
    assert f"run vllm --config {file} --set l1.size=3221225472B --set chunk_tokens=128 -- serve some/model" in kvcore
    assert "--dtype float32 --kv-offloading-size 3 --served" in offloading
    assert "/bin/lmc server --host 127.0.0.1" in lmcache
    assert "--l1-size-gb 3 --eviction-policy LRU --chunk-size 9 & " in lmcache
    assert '"kv_connector": "LMCacheMPConnector"' in lmcache
    assert "--dtype float32 --seed 5 --served" in mine
    (alone,) = vllm(tmp_path).ways(["kvcore"])
    assert "run vllm --set l1.size=3221225472B --set 'l2=[]' -- serve" in alone.command, "the default tier stays empty"
    with pytest.raises(ConfigError, match="two servers are called 'plain'"):
        made.ways(["plain", "plain"])


def test_an_engine_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    (subject,) = vllm(tmp_path, lmcache=[str(tmp_path / "none")]).ways(["lmcache"])
    with pytest.raises(EngineError, match="none cannot be run"), subject.up():
        pass


def test_an_engine_that_is_started_is_ended(tmp_path: Path) -> None:
    program = (
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('content-length', '0'); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    port = free_port()
    command = [sys.executable, "-c", program, str(port)]
    with vllm(tmp_path)._running("mine", command, f"http://127.0.0.1:{port}", "/health"):
        assert listens(port)
    assert not listens(port)
    assert "GET /health" in (tmp_path / "mine.log").read_text()


def test_what_was_started_ends_with_the_command(tmp_path: Path) -> None:
    """When it is told to end, while an engine comes up: where a process is being made, and signals are lost easily."""
    program = tmp_path / "lmcache"
    program.write_text(
        f"#!{sys.executable}\n"
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('content-length', '0'); self.end_headers()\n"
        "port = int(sys.argv[sys.argv.index('--http-port') + 1])\n"
        f"open({str(tmp_path / 'port')!r}, 'w').write(str(port))\n"
        "http.server.HTTPServer(('127.0.0.1', port), H).serve_forever()\n"
    )
    program.chmod(0o755)
    words = ["bench", "engine", "shared-prefix", "--vllm", str(tmp_path / "none"), "--with", "lmcache"]
    words += ["--lmcache", str(program), "--logs", str(tmp_path)]
    command = subprocess.Popen([sys.executable, "-m", "kvcore", *words], stderr=subprocess.DEVNULL)
    give_up = time.monotonic() + 60
    while not (tmp_path / "lmcache.log").exists():  # its server is there, and vLLM begins to import itself
        assert command.poll() is None
        assert time.monotonic() < give_up
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    assert not listens(int((tmp_path / "port").read_text()))


def test_given_servers_have_names() -> None:
    assert [s.name for s in given(["http://a:1", "b=http://b:2", "http://c/x?y=z"])] == [
        "http://a:1",
        "b",
        "http://c/x?y=z",
    ]


def test_all_of_a_result_is_json() -> None:
    found = Result("x", [Round([done("again", answered(1.0)), done("again", Answer(error="no"))], 1.0)], {}).as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["cost"] == {"computed_us": None, "reused_us": None}


def test_the_documented_defaults_are_true() -> None:
    for kind in WORKLOADS:
        (row,) = re.findall(rf"^\| `{kind.name}` \| (.*?) \|", PAGE, re.M)
        said = {name: value.replace(",", "") for name, value in re.findall(r"`--(\w+)` ([\d.,]+\d|\d)", row)}
        defaults = {each.name: str(each.default) for each in fields(kind) if each.name in said}
        assert said == defaults
        assert len(said) >= 5


def test_the_documented_commands_work(bird: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    found = [line.split()[1:] for line in re.findall(r"^    (kvcore bench engine .*)$", PAGE, re.M)]
    assert len(found) == 3
    for words in found:
        if "--vllm" in words:  # this one runs in tests/vllm
            parser = argparse.ArgumentParser()
            add_arguments(parser)
            assert parser.parse_args(words[2 : words.index("--")]).vllm == "MODEL"
            continue
        here = [re.sub(r"http://\S+", bird.url, word) for word in words]
        assert main([*here, *SMALL[words[2]]]) == 0
        capsys.readouterr()


def test_it_needs_no_torch() -> None:
    code = "import kvcore_bench.speed.engine, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
