"""The spaces that requests ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore_vllm import model_spec, spaces
from kvcore_vllm.spaces import Spaces

pytestmark = pytest.mark.vllm


class Engine:
    """Registers and clears, and remembers what."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, str]] = []
        self.cleared: list[str] = []

    def register(self, spec: Any, tenant: str = "") -> Any:
        self.registered.append((spec, tenant))
        return SimpleNamespace(spec=spec, tenant=tenant)

    def clear(self, space: Any) -> int:
        self.cleared.append(space.tenant)
        return 0


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Spaces:
    def build(config: Any, kv: Any, workers: Any, extra: Any) -> Any:
        return SimpleNamespace(extra=dict(extra))

    monkeypatch.setattr(model_spec, "build_spec", build)
    monkeypatch.setattr(spaces, "weights_fingerprint", lambda path: f"weights of {path}")
    monkeypatch.setattr(spaces, "MAX_SPACES", 3)
    anything: Any = engine
    layout: Any = object()
    found = Spaces(anything, None, None)
    assert not found
    found.set_workers({0: layout})
    assert found
    return found


def adapter(name: str, *, inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=f"/{name}", load_inplace=inplace)


def test_one_for_each_adapter_and_tenant(made: Spaces, engine: Engine) -> None:
    assert made.of(None, "") is made.of(None, "")
    assert made.of(None, "a") is made.of(None, "a")
    made.of(adapter("x"), "a")
    assert [(spec.extra, tenant) for spec, tenant in engine.registered] == [
        ({}, ""),
        ({}, "a"),
        ({"lora": "x:weights of /x"}, "a"),
    ]
    assert engine.registered[0][0] is engine.registered[1][0]  # the model is looked at once, not for each tenant


def test_the_least_recently_used_is_forgotten(made: Spaces, engine: Engine) -> None:
    first = made.of(None, "")
    for tenant in ("a", "b", "", "c"):  # a goes
        made.of(None, tenant)
    assert made.of(None, "") is first
    before = len(engine.registered)
    made.of(None, "a")
    assert len(engine.registered) == before + 1


def test_weights_loaded_in_place_may_be_others(made: Spaces, engine: Engine) -> None:
    made.of(adapter("x", inplace=True), "")
    made.of(adapter("x", inplace=True), "")
    assert [tenant for _, tenant in engine.registered] == ["", "", ""]


def test_after_a_reset_nothing_has_its_old_name(made: Spaces, engine: Engine) -> None:
    made.of(None, "a")
    made.renew()
    assert sorted(engine.cleared) == ["", "a"]
    made.of(None, "a")
    assert [set(spec.extra) for spec, _ in engine.registered] == [set(), set(), {"reset"}, {"reset"}]
    assert engine.registered[2][0].extra == engine.registered[3][0].extra


def test_an_adapter_is_looked_at_where_vllm_finds_it(
    made: Spaces, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    def found(path: str) -> str:
        made.of(SimpleNamespace(lora_name="x", lora_path=path, load_inplace=True), "")
        return str(engine.registered[-1][0].extra["lora"].removeprefix("x:weights of "))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "sql").mkdir()
    assert found("~/sql") == found(str(tmp_path / "sql")) == str(tmp_path / "sql")
    assert found("team/sql") == "team/sql"  # not loaded yet
    repository = tmp_path / "hub" / "models--team--sql"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text("{}")
    assert found("team/sql") == str(snapshot)
