"""`kvcore run sglang`: what becomes of the user's words."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.api import ConfigError, Context, LaunchRequest, PluginError
from kvcore_sglang import _compat
from kvcore_sglang.integration import SglangIntegration
from kvcore_sglang.launch import BACKEND, CACHE, EXTRA, OURS

FILE = "/etc/kvcore.yaml"
WANTED = {**OURS, "config": FILE}
SERVER = (sys.executable, "-m", "sglang.launch_server")


@pytest.fixture(autouse=True)
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that was tested, whatever is here."""
    monkeypatch.setattr("kvcore_sglang.integration.installed_sglang", lambda: _compat.TESTED)


def launch(*words: str, config: str | None = FILE, **more: Any) -> Any:
    request = LaunchRequest(words, "hicache", config=config, **more)
    return SglangIntegration(None, Context()).launch(request)


def extra(made: Any) -> Any:
    """Of the command line, which has it once."""
    (at,) = [i for i, word in enumerate(made.command) if word.startswith(EXTRA)]
    return json.loads(made.command[at + 1])


@pytest.mark.parametrize("words", [("serve", "M"), ("M",), ("--model-path", "M"), ("serve", "--model-path", "M")])
def test_the_flags_are_added_behind_what_the_user_wrote(words: tuple[str, ...]) -> None:
    made = launch(*words, "--port", "1")
    assert made.command[:-5] == (*SERVER, "--model-path", "M", "--port", "1")
    assert made.command[-5:-1] == (CACHE, BACKEND, "dynamic", EXTRA)
    assert extra(made) == WANTED
    assert (made.added, made.untested, made.env) == (made.command[-5:], "", {})


def test_values_and_no_file() -> None:
    assert extra(launch("M", config=None)) == OURS
    assert extra(launch("M", values={"lookup_timeout": "1s"})) == {**WANTED, "kvcore.lookup_timeout": "1s"}


@pytest.mark.parametrize("form", [(EXTRA, "{}"), (f"{EXTRA}={{}}",)])
def test_what_the_user_wrote_is_kept(form: tuple[str, ...]) -> None:
    given = {"prefetch_threshold": 16, "tenant": "alice"}
    words = [word.replace("{}", json.dumps(given)) for word in form]
    made = launch("M", CACHE, BACKEND, "dynamic", *words, "--port", "1")
    assert made.added == made.command[-2:]
    assert extra(made) == {**WANTED, **given}
    assert made.command[:-2] == (*SERVER, "--model-path", "M", CACHE, BACKEND, "dynamic", "--port", "1")


def test_nothing_is_added_where_all_is_there(tmp_path: Path) -> None:
    flags = (CACHE, f"{BACKEND}=dynamic", EXTRA, json.dumps({**WANTED, "tenant": "alice"}))
    made = launch("M", *flags)
    assert (made.added, made.command[-4:]) == ((), flags)
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(WANTED))
    made = launch("M", CACHE, BACKEND, "dynamic", EXTRA, f"@{file}")
    assert (made.added, made.command[-1]) == ((), f"@{file}")


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ([BACKEND, "file"], {}, "names 'file', and SGLang takes one"),
        ([BACKEND], {}, "its value is missing"),
        ([EXTRA, "{}", EXTRA, "{}"], {}, "is given twice"),
        ([EXTRA, "{"], {}, "is no JSON"),
        ([EXTRA, "[1]"], {}, "must be a JSON object"),
        ([EXTRA, "@/nothere.json"], {}, "/nothere.json does not name kvcore: add {"),
        ([EXTRA, '{"config":"other.yaml"}'], {}, "config: 'other.yaml', and kvcore run would say"),
        ([EXTRA, '{"class_name":"Other"}'], {}, "class_name: 'Other'"),
        ([], {"role": "prefill"}, "--disaggregation-mode"),
    ],
)
def test_what_cannot_go_together(words: list[str], more: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        launch("M", *words, **more)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_backend_in_sglangs_own_file(tmp_path: Path) -> None:
    """Our flags would replace it without a word."""
    file = tmp_path / "sglang.yaml"
    file.write_text("model-path: M\nhicache-storage-backend: file\n")
    with pytest.raises(ConfigError, match="has hicache-storage-backend: take it out there"):
        launch("--config", str(file))
    file.write_text("model-path: M\n")
    assert extra(launch("--config", str(file))) == WANTED


def test_another_version_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_sglang.integration.installed_sglang", lambda: "9.9.0")
    assert "sglang 9.9.0 is not the version that kvcore-sglang was tested with" in launch("M").untested
    monkeypatch.setattr("kvcore_sglang.integration.installed_sglang", lambda: None)
    with pytest.raises(PluginError, match="SGLang is not installed here: pip install sglang"):
        launch("M")
