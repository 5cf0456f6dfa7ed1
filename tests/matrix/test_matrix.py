"""Every storage under every engine, by the same file: what a first process has computed and stored, a second one
reuses, and says the same. README.md shows the results; `make matrix` writes them there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix_engines import ENGINES
from matrix_run import Matrix
from matrix_stores import STORAGES, stores
from matrix_table import BEGIN, END, differences, faults, parse, render

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROWS = [
    pytest.param(name, way, marks=[getattr(pytest.mark, engine.mark)] if engine.mark else [], id=way)
    for name, engine in ENGINES.items()
    for way in engine.rows
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    models = Path(os.environ.get("KVCORE_TEST_MODELS") or folder / "models")
    subprocess.run([sys.executable, ROOT / "examples/models/tiny.py", models, "tiny"], check=True)
    with stores(folder) as running:
        made = Matrix(running, folder, models)
        yield made
        if path := os.environ.get("KVCORE_TEST_MATRIX"):
            made.write(Path(path))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("engine", "way"), ROWS)
def test_a_storage_serves_an_engine_after_its_restart(matrix: Matrix, engine: str, way: str, storage: str) -> None:
    if storage in matrix.stores.missing:
        pytest.skip(f"NOT TESTED: {matrix.stores.missing[storage]}")
    plain, cold, hot = matrix.cells(engine, way)
    assert faults(plain, cold[storage], hot[storage]) == []
    assert cold[storage]["config"] == hot[storage]["config"] == matrix.stores.digest(storage), "another file"


@pytest.mark.parametrize(("engine", "way"), ROWS)
def test_the_readme_shows_what_this_run_has_seen(matrix: Matrix, engine: str, way: str) -> None:
    told, below = parse(README.read_text())
    seen = matrix.row(engine, way)
    (mine,) = [row for row in told if row["engine"] == seen["engine"]] or [{}]
    assert differences(mine, seen) == [], "run `make matrix`"
    if not matrix.stores.missing:
        assert below == matrix.below(engine), "run `make matrix`"


def test_a_table_is_read_as_it_was_written() -> None:
    rows = [{"engine": "one", "disk": "passed"}, {"engine": "two", "disk": "FAILED"}]
    assert parse(f"before {BEGIN}\n{render(rows, 'versions.')}\n{END} after") == (rows, "versions.")
    assert parse("nothing") == ([], "")
    assert differences({"engine": "one", "disk": "FAILED"}, rows[0]) == [
        "one, disk: the README says 'FAILED', this run 'passed'"
    ]


def test_what_is_wrong_with_a_cell_is_told() -> None:
    good = {"outputs": [[[1, 2], -0.5]], "failed": {}, "faults": {}, "prompt_tokens": 9}
    cold = {**good, "reused_tokens": 0, "stored_objects": 2, "loaded_objects": 0}
    hot = {**good, "reused_tokens": 8, "stored_objects": 0, "loaded_objects": 2}
    assert faults(good["outputs"], cold, hot) == []
    assert len(faults([[[1, 3], -0.5]], cold, hot)) == 1
    for wrong in (
        {"outputs": [[[1, 2], -0.6]]},
        {"outputs": []},
        {"reused_tokens": 0},
        {"loaded_objects": 0},
        {"failed": {"load: error": 1}},
        {"faults": {"lookup": 1}},
        {"error": "Traceback"},
    ):
        assert len(faults(good["outputs"], cold, {**hot, **wrong})) == 1, wrong
    for wrong in ({"reused_tokens": 8}, {"stored_objects": 0}):
        assert len(faults(good["outputs"], {**cold, **wrong}, hot)) == 1, wrong
