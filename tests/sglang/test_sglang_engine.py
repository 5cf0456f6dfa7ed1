"""Real SGLang engines: cold, hot, after a restart, damaged, over several ranks, on one server."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from answers import LOADED, NOTHING, PAGES, same

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def first(run_child: Any, folder: Path) -> Any:
    name = f'cold_and_hot:{{"folder": "{folder}"}}'
    return run_child(name)[name]


@pytest.fixture(scope="module")
def second(run_child: Any, folder: Path, first: Any) -> Any:
    """Another engine, on the same folder."""
    name = f'restarted:{{"folder": "{folder}"}}'
    return run_child(name)[name]


def found(result: Any, expected: Any, from_storage: list[int]) -> bool:
    """Are these the texts of the cold run, and so many tokens of them loaded?"""
    texts, loaded = result
    return same(texts, expected["cold"][0]) and loaded == from_storage


def test_cold_and_hot(first: Any) -> None:
    assert first["cold"][1] == NOTHING
    assert found(first["hot"], first, LOADED)
    assert (first["stored"], first["files"]) == (PAGES, PAGES)
    assert first["loaded"] == sum(LOADED) / 16


def test_prompts_are_explained_by_the_pages_that_sglang_has_stored(first: Any) -> None:
    """Its own hashes, salt included; and lookups, of which it names none."""
    assert first["explained"] == [[12, 12], [9, 9], [4, 4], [0, 12], [0, 12]]
    assert first["last"] == {"id": "", "named": True, "saved": None}


def test_after_a_restart(first: Any, second: Any) -> None:
    assert found(second["hot"], first, LOADED)


def test_damaged_pages_are_computed_and_stored_anew(first: Any, second: Any) -> None:
    """One bit of each is another: the checksum says so."""
    assert found(second["damaged"], first, NOTHING)
    assert second["corrupt"] >= 3  # of each prompt at least the first page that was asked for
    assert found(second["whole"], first, LOADED)


def test_by_copies_instead_of_in_place(first: Any, second: Any) -> None:
    assert second["attached"] == ""
    assert found(second["flat_cold"], first, NOTHING)  # what lies there was stored in place: other bytes, other keys
    assert found(second["flat_hot"], first, LOADED)


def test_clear(first: Any, second: Any) -> None:
    assert found(second["cleared"], first, NOTHING)
    assert found(second["after_clear"], first, LOADED)


def test_a_wrong_configuration_is_refused_with_its_place(first: Any, second: Any) -> None:
    assert "confg: unknown" in second["refused"]
    assert "Did you mean config?" in second["refused"]
    assert found(second["without"], first, NOTHING)


@pytest.mark.parametrize(
    ("ranks", "layout", "io"),
    [({"tp_size": 2}, "layer_first", "direct"), ({"pp_size": 2}, "page_head", "kernel")],
    ids=["tensor-parallel", "pipeline-parallel"],
)
def test_two_ranks(run_child: Any, tmp_path: Path, first: Any, ranks: Any, layout: str, io: str) -> None:
    arguments = {"folder": str(tmp_path), **ranks, "hicache_mem_layout": layout, "hicache_io_backend": io}
    name = f"cold_and_hot:{json.dumps(arguments)}"
    result = run_child(name, SGLANG_CPU_OMP_THREADS_BIND="0|0" if os.cpu_count() == 1 else "0|1")[name]
    assert found(result["cold"], first, NOTHING)
    assert found(result["hot"], first, LOADED)
    assert result["files"] == 2 * PAGES  # each rank its own


def test_two_engines_on_one_server(run_child: Any, first: Any) -> None:
    result = run_child("shared", timeout_s=850)["shared"]
    assert found(result["away"], first, NOTHING)  # the engine is there before the server
    assert found(result["found"], first, LOADED)
    assert found(result["other"], first, LOADED)
    assert result["stored"] == PAGES  # once
    assert found(result["killed"], first, NOTHING)
    assert found(result["back"], first, LOADED)
