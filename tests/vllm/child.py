"""Runs scenarios in a fresh process: `child.py RESULT MODELS NAME[:JSON]...`.

Writes {name: result or {"error": text}} to the file RESULT.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

MODULES = (
    "scenarios_basic",
    "scenarios_faults",
    "scenarios_disk",
    "scenarios_stores",
    "scenarios_multimodal",
    "scenarios_pd",
    "scenarios_server",
    "scenarios_events",
    "scenarios_admission",
    "scenarios_several",
    "scenarios_tier",
)


def main() -> None:
    result_path, models, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    for item in names:
        name, _, arguments = item.partition(":")
        try:
            results[item] = find(name)(Path(models), **json.loads(arguments or "{}"))
        except BaseException:
            results[item] = {"error": traceback.format_exc()}
        Path(result_path).write_text(json.dumps(results))


def find(name: str) -> Any:
    for module in MODULES:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise LookupError(f"no scenario {name}")


if __name__ == "__main__":
    main()
