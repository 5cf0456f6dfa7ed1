"""The environment and flags, laid over the file: flags > environment > file > defaults."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.config.tree import Fault, Path, Source, Tree, parse_path, show
from kvcore.config.yaml_file import read_text, scalar

PREFIX = "KVCORE_"
OTHER_VARIABLES = {
    "KVCORE_CONFIG": "the configuration file, when none is given",
    "KVCORE_BLOCK_PLUGINS": "plugins that must not be imported, separated by commas",
    "KVCORE_ALLOW_PLUGINS": "when set, no other plugins may be imported, except the core's own",
}
"""Variables of this prefix that are no fields. `KVCORE_LOG_LEVEL` is the field `log_level`."""
TEST_PREFIX = "KVCORE_TEST_"
"""Variables of test suites, which run engines in their own environment. Not looked at."""


def apply_environment(tree: Tree, env: Mapping[str, str]) -> list[Fault]:
    """Set every `KVCORE_` variable: `__` goes one level down, a number is an index, letter case does not matter."""
    faults: list[Fault] = []
    wanted: list[tuple[Path, str, str]] = []
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable.startswith(TEST_PREFIX) or variable in OTHER_VARIABLES:
            continue
        parts = variable.removeprefix(PREFIX).lower().split("__")
        if not all(parts):
            faults.append(Fault(f"environment {variable}", "", "has an empty part between `__`"))
            continue
        wanted.append((tuple(int(p) if p.isdecimal() else p for p in parts), variable, text))
    # Parents before children, and indexes in order, so that a variable refines what another has set.
    for path, variable, text in sorted(wanted, key=lambda w: (len(w[0]), [(isinstance(p, str), p) for p in w[0]])):
        faults += _set_text(tree, path, text, Source("environment", variable))
    return faults


def apply_flags(tree: Tree, flags: Mapping[str, Any]) -> list[Fault]:
    """Set every flag, a dotted path and a value. Text is read like the environment's; a mapping is merged into what is
    there, but one that names a `plugin` replaces it."""
    faults: list[Fault] = []
    for name, value in flags.items():
        source = Source("flag", name)
        try:
            path = parse_path(name)
        except ValueError as e:
            faults.append(Fault(str(source), "", str(e)))
            continue
        for leaf, item in _leaves(path, value):
            if isinstance(item, str):
                faults += _set_text(tree, leaf, item, source)
            elif problem := tree.set(leaf, item, source):
                faults.append(Fault(str(source), "", problem))
    return faults


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and "plugin" not in value:
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child)
    else:
        yield path, value


def _set_text(tree: Tree, path: Path, text: str, source: Source) -> list[Fault]:
    """Text is a plain YAML value; one that starts with `[` or `{` is a YAML list or mapping."""
    if text.lstrip()[:1] in ("[", "{"):
        inner, faults = read_text(f"value: {text}", str(source))
        if faults:
            return [Fault(str(source), show(path), f.text) for f in faults]
        value, raw = inner.value["value"], None
    else:
        value, raw = scalar(text), text
    problem = tree.set(path, value, source, raw)
    return [Fault(str(source), "", problem)] if problem else []
