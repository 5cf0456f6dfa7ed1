"""Programs that `kvcore serve` runs beside itself (`plugins.run`). Imports pydantic: keep it out of start-up."""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr, WithJsonSchema

from kvcore.api.config import PluginConfig
from kvcore.config.tree import DEFAULT, Fault, Path, Source, Tree, show

SUFFIXES = (".py", ".sh")
MAX_SCRIPTS = 32
RUN: Path = ("plugins", "run")
TOLD = ("KVCORE_SERVER", "KVCORE_CONFIG", "KVCORE_HTTP")
"""What `kvcore serve` tells its programs: where it is."""


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("no variable can have this name: it must not be empty, nor have `=` in it")
    return name


class ScriptConfig(PluginConfig):
    """One program."""

    written: ClassVar = "must be a path, or a mapping with `path`"

    path: str = Field(min_length=1)
    """A file that ends with `.py`, run by the server's own Python, or with `.sh`, run by `sh`. One that is not absolute
    is looked for in the folder of the configuration's file."""

    args: tuple[str, ...] = ()
    """What it is given on its command line."""

    env: dict[Annotated[str, AfterValidator(_variable)], SecretStr] = {}
    """Variables beside the server's own, and before them where the names are the same. The values are not shown."""

    restart: Literal["always", "failure", "never"] = "always"
    """When it is started again after its end: `always`; after a `failure`, an exit status other than 0; or `never`."""


class PluginsConfig(PluginConfig):
    """What runs beside the cache."""

    run: Annotated[
        tuple[ScriptConfig, ...],
        WithJsonSchema({"type": "array", "items": {"type": "string", "examples": ["warm.py"]}}),
    ] = Field(default=(), max_length=MAX_SCRIPTS)
    """Programs that `kvcore serve` starts, watches and ends: paths, or mappings, see
    [below](#each-entry-of-pluginsrun). Engines run none of them."""


def settle(tree: Tree) -> None:
    """Write each entry of `plugins.run` as a mapping, its path under the folder of the file that names it."""
    plugins = tree.value.get("plugins")
    if isinstance(plugins, dict) and "run" in plugins and plugins["run"] is None:  # as YAML reads a list without lines
        tree.set(RUN, [], tree.source(RUN))
    run = plugins.get("run") if isinstance(plugins, dict) else None
    for i, entry in enumerate(run if isinstance(run, list) else ()):
        at, source = (*RUN, i), tree.source((*RUN, i))
        if isinstance(entry, str):
            tree.set(at, {"path": _under(entry, source)}, source)
        elif isinstance(entry, dict) and isinstance(entry.get("path"), str):
            at = (*at, "path")
            source = tree.source(at)
            tree.set(at, _under(entry["path"], source), source)


def _under(path: str, source: Source) -> str:
    folder = os.path.dirname(os.path.abspath(source.name)) if source.kind == "file" else os.getcwd()
    return os.path.join(folder, os.path.expanduser(path)) if path else path


def script_faults(plugins: PluginsConfig, sources: Mapping[str, Source]) -> list[Fault]:
    """What cannot be run on this machine. For who runs it: the same file may serve engines that see other folders."""
    faults = []
    for i, script in enumerate(plugins.run):
        path = show((*RUN, i, "path"))
        faults += [Fault(str(sources.get(path, DEFAULT)), path, text) for text in _wrong(script.path)]
    return faults


def _wrong(path: str) -> Iterator[str]:
    if not path.endswith(SUFFIXES):
        yield f"{path} ends with neither {' nor '.join(SUFFIXES)}: only Python and shell scripts are run"
    elif not os.path.exists(path):
        yield f"there is no {path}: a path that is not absolute begins at the folder of the file that names it"
    elif not os.path.isfile(path):
        yield f"{path} is no file"
    elif not os.access(path, os.R_OK):
        yield f"{path} cannot be read by this user"
