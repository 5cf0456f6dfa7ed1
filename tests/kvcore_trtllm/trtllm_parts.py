"""What kvcore-trtllm relies on in TensorRT-LLM, part by part, against `trtllm_record.json`: facts read in the published
source, at the commits named there. As a script: prints, as JSON, what each part of the record is in the `tensorrt_llm`
that this Python imports, "" where it is as recorded.
"""

import importlib
import importlib.util
import inspect
import json
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "trtllm_record.json").read_text())
MODULES = ("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
           "tensorrt_llm._torch.pyexecutor.kv_cache_connector")  # fmt: skip
"""Where the interface stands, the newest first."""


def parts(*sections: str) -> dict[str, str]:
    """Part -> what it must be."""
    return {name: what for section in sections for name, what in RECORD[section]["parts"].items()}


def fault(name: str, what: str, *, optional: bool = False) -> str:
    """What is wrong with one part, or ""."""
    try:
        _check(name, what, optional)
    except (ImportError, AttributeError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def _check(name: str, what: str, optional: bool) -> None:
    where, _, path = name.rpartition(":")
    owner: Any = importlib.import_module(where) if where else interface()
    *classes, last = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    if optional and not hasattr(owner, last):
        return
    if what == "field":
        assert last in _fields(owner), f"there is no field {path}"
        return
    if what == "set in __init__":
        assert f"self.{last}" in inspect.getsource(owner.__init__), f"{path} is not set"
        return
    names = [name for name in (last, *what.split(", once ")[1:]) if hasattr(owner, name)]
    assert names, f"there is no {path}"
    found = getattr(owner, names[0])
    if what.endswith(")"):
        recorded = [p for p in what.rpartition("(")[2].rstrip(")").split(", ") if p]
        there = list(inspect.signature(found).parameters)
        assert there == recorded, f"its parameters are {', '.join(there)}"
        abstract = getattr(found, "__isabstractmethod__", False)
        assert abstract == what.startswith("abstract"), "it is abstract" if abstract else "it is not abstract"


def _fields(owner: Any) -> set[str]:
    if is_dataclass(owner):
        return {field.name for field in fields(owner)}
    return set(owner.model_fields)


def interface() -> Any:
    """The module of the connector interface."""
    for name in MODULES:
        if importlib.util.find_spec(name.rpartition(".")[0]) is not None and importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError(f"there is none of {', '.join(MODULES)}")


def abstract(which: str) -> list[str]:
    """The methods that a connector must have, of the Scheduler or the Worker."""
    return sorted(getattr(interface(), f"KvCacheConnector{which}").__abstractmethods__)


def recorded_abstract(which: str) -> list[str]:
    """The same of the record."""
    begin = f"KvCacheConnector{which}."
    return sorted(
        n.removeprefix(begin) for n, what in parts("interface").items() if n.startswith(begin) and "abs" in what
    )


if __name__ == "__main__":
    faults = {name: fault(name, what) for name, what in parts("interface", "package", "arguments", "request").items()}
    faults |= {name: fault(name, what, optional=True) for name, what in parts("optional").items()}
    for half in ("Scheduler", "Worker"):
        there, known = abstract(half), recorded_abstract(half)
        faults[f"abstract methods of the {half}"] = "" if there == known else f"they are {', '.join(there)}"
    json.dump(faults, sys.stdout)
