"""One engine over every configuration file: `drive_ENGINE.py RESULT MODELS FILE...`, in the engine's environment, with
the folder of its own tests in the path.

It runs twice: `cold`, with empty stores, and `hot` in a new process. RESULT is JSON: versions, what the engine says
without kvcore, and per way in which it uses kvcore and per file (by its stem) a cell, or {"error": text}.
"""

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
"""For what a busy machine does late."""
CLIENTS = ("boto3", "mooncake-transfer-engine-non-cuda", "nixl-cu12")
"""Libraries that storages use inside the engine."""

Cell = dict[str, Any]
Serve = Callable[[Path], Cell]
"""Runs the engine's prompts with kvcore as this file configures it."""
Opened = AbstractContextManager[tuple[Any, Mapping[str, Serve]]]
"""What the engine says without kvcore, and its ways to use it by name."""


def main(distribution: str, opened: Callable[[Path], Opened]) -> None:
    """A driver's main program."""
    result, models, *files = map(Path, sys.argv[1:])
    versions = {name: version(name) for name in (distribution, "kvcore", *CLIENTS)}
    out: dict[str, Any] = {"versions": versions, "cells": {}}
    with opened(models) as (out["plain"], ways):
        for name, serve in ways.items():
            cells = out["cells"][name] = {}
            for file in files:
                try:
                    cells[file.stem] = {**serve(file), "config": digest(file)}
                except Exception:
                    cells[file.stem] = {"error": traceback.format_exc()}
                result.write_text(json.dumps(out))


def digest(file: Path) -> str:
    """Tells whether two engines had the same file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def cell(outputs: Any, prompt_tokens: int, reused_tokens: int, numbers: Mapping[str, float], faults: Any) -> Cell:
    """What is recorded of one engine with one file.

    Args:
        outputs: texts with their log probabilities, or digests of KV.
        reused_tokens: as the engine counts them.
        numbers: kvcore's, of the whole run.
        faults: caught where kvcore meets the engine.
    """
    moved = {"load": 0, "store": 0}
    failed: dict[str, float] = {}
    for name, value in numbers.items():
        if not name.startswith("kvcore_tier_operations_total{"):
            continue
        labels = dict(part.split("=") for part in name.partition("{")[2].rstrip("}").replace('"', "").split(","))
        if labels["outcome"] == "ok":
            moved[labels["op"]] += int(value)
        elif labels["outcome"] != "missing" and value:
            failed[f"{labels['op']}: {labels['outcome']}"] = value
    return {
        "outputs": outputs,
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused_tokens,
        "loaded_objects": moved["load"],
        "stored_objects": moved["store"],
        "failed": failed,
        "faults": faults,
    }
