"""Child processes that make the same component as the test which started them: by importing the author's suite."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any


def child_command(module: str, suite: type, *arguments: str) -> list[str]:
    """The command that runs `module.main` with what names `suite`, then `arguments`."""
    path = str(sys.modules[suite.__module__].__file__)
    search_path = json.dumps([p for p in sys.path if p])  # no part of the code, which a traceback shows
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import {module} as it; it.main(sys.argv[1:])"
    return [sys.executable, "-c", start, search_path, path, suite.__module__, suite.__qualname__, *arguments]


def suite_from_arguments(arguments: Sequence[str]) -> Any:
    """In the child: an instance of the suite that `child_command` was given."""
    path, module_name, qualname = arguments[:3]
    suite = _module(path, module_name)
    for part in qualname.split("."):
        suite = getattr(suite, part)
    return suite()


def _module(path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
