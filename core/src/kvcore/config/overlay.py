"""The environment and flags, laid over the file: flags > environment > file > defaults."""

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from kvcore.config.tree import MAX_DEPTH, MAX_INT, NO_TEXT, Fault, Path, Source, Tree, is_text, parse_path, show
from kvcore.config.yaml_file import MAX_VALUES, read_text, scalar

PREFIX = "KVCORE_"
OTHER_VARIABLES = {
    "KVCORE_CONFIG": "the configuration file, when none is given",
    "KVCORE_HTTP": "set by `kvcore serve` for the programs of `plugins.run`: where it serves HTTP",
    "KVCORE_RUN_DIR": "the folder of the sockets through which open caches are asked, see [inspect.md](inspect.md)",
    "KVCORE_CUDA_KERNELS": "`off`: KV on NVIDIA GPUs is copied by torch operations, also where CuPy is installed",
    "KVCORE_BLOCK_PLUGINS": "plugins that must not be imported: a list as described below",
    "KVCORE_ALLOW_PLUGINS": "when set, no other plugins but the core's own may be imported: a list of the same form",
}
"""Variables of this prefix that are no fields. `KVCORE_LOG_LEVEL` is the field `log_level`."""
TEST_PREFIX = "KVCORE_TEST_"
"""Variables of test suites, which run engines in their own environment. Not looked at."""
MAX_INDEX_DIGITS = 9
_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)\Z")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+\Z")


def apply_environment(tree: Tree, env: Mapping[str, str]) -> list[Fault]:
    """Set every `KVCORE_` variable: `__` goes one level down, a number is an index, letter case does not matter."""
    faults: list[Fault] = []
    wanted: list[tuple[Path, str, str]] = []
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or _is_foreign(variable, text):
            continue
        parts = variable.removeprefix(PREFIX).lower().split("__")
        if not all(parts):
            faults.append(Fault(f"environment {variable}", "", "has an empty part between `__`"))
            continue
        if any(p.isdecimal() and len(p) > MAX_INDEX_DIGITS for p in parts):
            faults.append(Fault(f"environment {variable}", "", "has an index that no list reaches"))
            continue
        wanted.append((tuple(int(p) if p.isdecimal() else p for p in parts), variable, text))
    # Parents before children, and indexes in order, so that a variable refines what another has set.
    for path, variable, text in sorted(wanted, key=lambda w: (len(w[0]), [(isinstance(p, str), p) for p in w[0]])):
        faults += _set_text(tree, path, text, Source("environment", variable))
    return faults


def _is_foreign(variable: str, text: str) -> bool:
    """Whether a variable of our prefix is somebody else's. Kubernetes gives every container the addresses of each
    service, so that one named `kvcore` or `kvcore-metrics` makes `KVCORE_SERVICE_HOST` and `KVCORE_METRICS_PORT`."""
    if variable.startswith(TEST_PREFIX) or variable in OTHER_VARIABLES or _SERVICE.search(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_URL.match(text) is not None


def apply_flags(tree: Tree, flags: Mapping[str, Any]) -> list[Fault]:
    """Set every flag, a dotted path and a value. Text is read like the environment's; a mapping is merged into what is
    there, but one that names a `plugin` replaces it."""
    faults: list[Fault] = []
    for name, value in flags.items():
        source = Source("flag", str(name))
        try:
            path = parse_path(name)
            value = _plain(value, 0, count())  # noqa: PLW2901
        except ValueError as e:
            faults.append(Fault(str(source), "", str(e)))
            continue
        for leaf, item in _leaves(path, value):
            if isinstance(item, str):
                faults += _set_text(tree, leaf, item, source)
            elif problem := tree.set(leaf, item, source):
                faults.append(Fault(str(source), "", problem))
    return faults


def _plain(value: Any, depth: int, seen: Iterator[int]) -> Any:
    """A copy of what Python code has given, in the types that YAML has. Raises `ValueError`."""
    if depth > MAX_DEPTH:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels, or holds itself")
    if next(seen) > MAX_VALUES:
        raise ValueError(f"holds more than {MAX_VALUES} values")
    if isinstance(value, Mapping):
        return {str(k): _plain(v, depth + 1, seen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, depth + 1, seen) for v in value]
    if isinstance(value, str) and depth and not is_text(value):
        raise ValueError(f"holds text that is {NO_TEXT}")
    if type(value) is int and abs(value) > MAX_INT:
        raise ValueError("is a number of more than 64 bits")
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and "plugin" not in value:
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child)
    else:
        yield path, value


def _set_text(tree: Tree, path: Path, text: str, source: Source) -> list[Fault]:
    """Text is a plain YAML value; one that starts with `[` or `{` is a YAML list or mapping."""
    if not is_text(text):
        return [Fault(str(source), show(path), f"is {NO_TEXT}")]
    if text.lstrip()[:1] in ("[", "{"):
        inner, faults = read_text(f"value: {text}", str(source))
        if faults:
            return [Fault(str(source), show(path), f.text) for f in faults]
        value, raw = inner.value["value"], None
    else:
        value, raw = scalar(text), text
    problem = tree.set(path, value, source, raw)
    return [Fault(str(source), "", problem)] if problem else []
