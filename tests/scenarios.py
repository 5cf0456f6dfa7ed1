"""Scenarios in real engines. Each is a function of a `scenarios_*.py` in a folder of tests; it is called with the place
of its model or models. They run in a process of their own, several in each: importing an engine takes longer than a
scenario.

As a script, in that process: `scenarios.py FOLDER RESULT MODELS NAME[:JSON]...` writes {NAME[:JSON]: result, or
{"error": text}} to the file RESULT.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # SGLang's ranks import this file from elsewhere
    from warm import Warm


class Results(dict[str, Any]):
    """Results by scenario; looking up one that failed raises with its traceback and the end of the log."""

    def __init__(self, values: dict[str, Any], log: Path) -> None:
        super().__init__(values)
        self.log = log

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{name}\n{value['error']}\n{self.log.read_text()[-4000:]}")
        return value


def run(
    python: Path | str,
    folder: Path,
    models: Path,
    names: Sequence[str],
    *,
    place: Path,
    environment: Mapping[str, str],
    timeout_s: int,
    warm: "Warm | None" = None,
) -> Results:
    """Run these scenarios of `folder` in one new process of `python`, or one that `warm` forks. Raises for a process
    that fails, not for them."""
    result, log = place / "result.json", place / "log.txt"
    words = [str(folder), str(result), str(models), *names]
    if warm is not None:
        code = warm.run("scenarios:work", *words, environment=environment, output=log, timeout_s=timeout_s)
    else:
        with log.open("w") as stream:
            command = [str(python), __file__, *words]
            code = subprocess.run(
                command, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            ).returncode
    assert code == 0, f"the child process ended with {code}\n{log.read_text()[-6000:]}"
    return Results(json.loads(result.read_text()), log)


# -- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    sys.path[0] = sys.argv[1]  # instead of this file's own, whose folders bear the names of engines
    work(*sys.argv[1:])


def work(folder: str, result: str, models: str, *names: str) -> None:
    """Run scenarios of `folder`, which is in the path."""
    results: dict[str, Any] = {}
    for item in names:
        name, _, arguments = item.partition(":")
        try:
            results[item] = find(Path(folder), name)(Path(models), **json.loads(arguments or "{}"))
        except BaseException:
            results[item] = {"error": traceback.format_exc()}
        Path(result).write_text(json.dumps(results))


def find(folder: Path, name: str) -> Any:
    for path in folder.glob("scenarios_*.py"):
        if re.search(rf"^def {name}\(", path.read_text(), re.M):
            return getattr(importlib.import_module(path.stem), name)
    raise LookupError(f"no scenario {name}")


if __name__ == "__main__":  # SGLang's ranks import this file again
    main()
    if "sglang" in sys.modules:  # an orderly end frees all that it has imported, piece by piece, which takes seconds
        sys.stdout.flush()
        os._exit(0)
