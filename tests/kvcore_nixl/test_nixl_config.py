"""Wrong options are refused with the next step; what is missing on the machine is named."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nixl_place import in_files, make_nixl
from pydantic import ValidationError

from kvcore.api import StorageError
from kvcore_nixl import library
from kvcore_nixl.config import NixlConfig

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"paht": "/x"}, "paht"),
    "unknown backend": ({"backend": "ucx"}, "'posix', 'obj', 'gds' or 'gds_mt'"),
    "empty path": ({"path": ""}, "an empty path"),
    "bucket for files": ({"bucket": "b"}, "`bucket` is an option of `backend: obj`, this one is `backend: posix`"),
    "path for objects": ({"backend": "obj", "bucket": "b", "path": "/x"}, "`path` is an option of the file backends"),
    "no bucket": ({"backend": "obj"}, "`backend: obj` needs `bucket`"),
    "secret in the file": (
        {"backend": "obj", "bucket": "b", "params": {"secret_key": "hunter2"}},
        "`secret_key` does not belong in this file: set AWS_ACCESS_KEY_ID",
    ),
    "endpoint without scheme": ({"backend": "obj", "bucket": "b", "endpoint": "10.0.0.1:9000"}, "endpoint"),
    "params that are no text": ({"params": {"use_uring": ["yes"]}}, "use_uring"),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NixlConfig.model_validate(options)
    assert says in str(caught.value)


def test_values_of_yaml_become_text() -> None:
    assert NixlConfig.model_validate({"params": {"a": True, "b": False, "c": 8, "d": "x"}}).params == {
        "a": "true",
        "b": "false",
        "c": "8",
        "d": "x",
    }


def test_a_misspelt_parameter_is_refused(tmp_path: Path) -> None:
    """NIXL itself would take it without a word."""
    with (
        pytest.raises(StorageError, match=r"`params`: NIXL's POSIX has no use_urnig; it has .*use_uring"),
        in_files(tmp_path, params={"use_urnig": True}),
    ):
        pass


def test_a_parameter_that_nixl_refuses(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"NIXL cannot start its backend POSIX .*other `params`"),
        in_files(tmp_path, params={"use_uring": "perhaps"}),
    ):
        pass


@pytest.mark.parametrize("size", [1024, "many"])
def test_a_queue_that_is_too_small(tmp_path: Path, size: object) -> None:
    with (
        pytest.raises(StorageError, match=f"`params`: ios_pool_size {size} is too small, 16384 or more is needed"),
        in_files(tmp_path, params={"ios_pool_size": size}),
    ):
        pass


@pytest.mark.parametrize("backend", ["gds", "gds_mt"])
def test_gds_says_that_nobody_has_tested_it(tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without cuFile it cannot be opened either."""
    refused = ""
    with caplog.at_level(logging.WARNING, "kvcore"):
        try:
            in_files(tmp_path, backend=backend).__enter__().close()
        except StorageError as error:
            refused = str(error)
    assert f"backend {backend} of kvcore-nixl has never been run by its tests" in caplog.text
    if not Path("/dev/nvidia0").exists():
        assert "needs cuFile (libcufile) and an NVIDIA driver, or choose another `backend`" in refused


def test_without_nixl_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in library.MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StorageError) as caught, in_files(tmp_path):
        pass
    text = str(caught.value)
    assert text.startswith("NIXL is not installed (nixl: ")
    assert "nixl_cu13: " in text
    assert "pip install 'kvcore-nixl[cu12]' or 'kvcore-nixl[cu13]'" in text


def test_an_old_nixl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda module: "1.4.10")
    with pytest.raises(StorageError, match=r"1\.4\.10 is too old: 1\.5\.1 or newer is needed"), in_files(tmp_path):
        pass


def test_the_plugin_loads_without_nixl() -> None:
    """What `kvcore plugins show` and the docs do needs no NIXL."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('nixl', 'nixl_cu12', 'nixl_cu13', 'boto3', 'torch')));"
        "from kvcore_nixl.plugin import kvcore_storage; print(kvcore_storage().factory.persistent)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize("backend", ["posix", "gds"])
def test_nixl_says_nothing_on_stdout_and_leaves_logging_alone(tmp_path: Path, backend: str) -> None:
    """Also where it does not open: NIXL's own lines then stand on stderr."""
    code = (
        "import contextlib, logging; from nixl_place import in_files; from pathlib import Path\n"
        "from kvcore.api import StorageError\n"
        f"with contextlib.suppress(StorageError), in_files(Path({str(tmp_path)!r}), backend={backend!r}): pass\n"
        "assert logging.raiseExceptions"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert backend == "gds" or done.stderr == ""


def test_closed_and_not_yet_open(tmp_path: Path) -> None:
    storage = make_nixl(path=str(tmp_path))
    storage.close()
    for call in (storage.load, storage.store, storage.exists):
        assert call([]) == []
