"""Runs scenarios in a fresh process of SGLang's environment: `child.py RESULT MODEL NAME[:JSON]...`.

Writes {name: result or {"error": text}} to the file RESULT.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

MODULES = ("scenarios_apis", "scenarios_pools", "scenarios_engine", "scenarios_faults")


def main() -> None:
    result_path, model, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    for item in names:
        name, _, arguments = item.partition(":")
        try:
            results[item] = find(name)(Path(model), **json.loads(arguments or "{}"))
        except BaseException:
            results[item] = {"error": traceback.format_exc()}
        Path(result_path).write_text(json.dumps(results))


def find(name: str) -> Any:
    for module in MODULES:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise LookupError(f"no scenario {name}")


if __name__ == "__main__":  # SGLang's ranks import this file again
    main()
    sys.stdout.flush()
    os._exit(0)  # an orderly end frees all that SGLang has imported, piece by piece, which takes seconds
