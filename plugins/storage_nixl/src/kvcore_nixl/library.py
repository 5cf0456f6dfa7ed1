"""Finds NIXL, whose Python module has another name in each of its wheels."""

import importlib
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvcore.api import StorageError

MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
OLDEST = "1.5.1"
"""Before it, the POSIX backend called a short write a success, and reported an error while I/O still went on."""
_INSTALL = "pip install 'kvcore-nixl[cu12]' or 'kvcore-nixl[cu13]', by the CUDA version of this machine"


def load_nixl(log: logging.Logger) -> Any:
    """The module. Raises `StorageError` that says what to install."""
    failures = []
    for name in MODULES:
        raise_exceptions = logging.raiseExceptions
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
            continue
        finally:
            logging.raiseExceptions = raise_exceptions  # NIXL turns it off for the whole process
        _quieten()
        _check_version(name, log)
        return module
    raise StorageError(f"NIXL is not installed ({'; '.join(failures)}): {_INSTALL}")


def _quieten() -> None:
    """Its Python part writes to stdout, which belongs to the program, and greets at each agent."""
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR)


def _check_version(module: str, log: logging.Logger) -> None:
    try:
        found = version(module)
    except PackageNotFoundError:  # built from source
        log.warning("the version of %s is not known; %s or newer is needed", module, OLDEST)
        return
    if _numbers(found) < _numbers(OLDEST):
        raise StorageError(f"{module} {found} is too old: {OLDEST} or newer is needed: {_INSTALL}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)[:3]]
