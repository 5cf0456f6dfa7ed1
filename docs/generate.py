"""Writes what is generated in this folder: configuration.md, plugins.md, hooks.md, metrics.md, cli.md, pictures.

    python docs/generate.py           write them
    python docs/generate.py --check   status 1 when one is out of date

The packages of this repository must be installed.
"""

import argparse
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.pop("XDG_CACHE_HOME", None)  # a default path must not depend on who writes the page

import cli_page
import pictures

from kvcore.api import API_VERSIONS, GROUPS, KINDS, ObjectEvent, Span, hooks
from kvcore.config import (
    Config,
    HttpConfig,
    InspectConfig,
    L1Config,
    PluginsConfig,
    ScriptConfig,
    ServerConfig,
    TierConfig,
)
from kvcore.config.describe import Option, options
from kvcore.config.overlay import OTHER_VARIABLES
from kvcore.observe import METRICS
from kvcore.plugins import Registry

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py: change the source and run it. -->"


def configuration() -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration",
        NOTE,
        "One YAML file, given to the engine's connector or named by `KVCORE_CONFIG`. `kvcore config check FILE` lists "
        "every fault with its place; `kvcore config show FILE` gives every value and where it comes from.",
        "```yaml\nl1:\n  size: 8GiB\nl2:\n  - storage: {plugin: memory, capacity: 2GiB}\n```",
        "**Precedence**: flags > environment > file > defaults.",
        "**Units**: sizes and durations are written with a unit, `8GiB`, `500MB`, `200ms`, `2s`. A bare number is "
        "refused.",
        "**Plugins** are written as a name, `disk`, or as a mapping with options, `{plugin: disk, path: /cache}`. "
        "Where two distributions give the same name, `disk@kvcore-disk` chooses. The options of each are in "
        "[plugins.md](plugins.md), and `kvcore plugins show NAME` prints them.",
        "**Environment**: `KVCORE_` and the path in capitals, `__` for one level down, a number for an index: "
        "`KVCORE_L1__SIZE=8GiB`, `KVCORE_L2__0__STORAGE__PATH=/cache`. A value that starts with `[` or `{` is a YAML "
        "list or mapping; `null` is nothing. A variable of this prefix that names no field is refused, except "
        "`KVCORE_TEST_*`, which is left to test suites, and the addresses that Kubernetes makes for services "
        "(`KVCORE_SERVICE_HOST`, `KVCORE_PORT=tcp://...`).",
        "**Flags**: `--set PATH=VALUE` of the command line, `--set l2[0].storage.path=/cache`.",
        "## Fields",
        _table(options(Config), {"keys": "`engine`", "l1": "", "l2": "", "plugins": "", "inspect": ""}),
        "## `l1`",
        _table(options(L1Config), {"eviction": "`lru`"}),
        "## `server`",
        "How a server is started and used: [server.md](server.md).",
        _table(options(ServerConfig), {}),
        "## `server.http`",
        "What is served there: [http.md](http.md).",
        _table(options(HttpConfig), {}),
        "## Each entry of `l2`",
        _table(options(TierConfig), {"name": "", "eviction": "`lru`"}),
        "## `plugins`",
        "How they are run: [server.md](server.md#programs-beside-the-server).",
        _table(options(PluginsConfig), {"run": "`[]`"}),
        "## Each entry of `plugins.run`",
        "Or only the path.",
        _table(options(ScriptConfig), {}),
        "## `inspect`",
        _table(options(InspectConfig), {}),
        "## Other variables",
        "\n".join(["| variable | meaning |", "|---|---|", *(f"| `{v}` | {t} |" for v, t in OTHER_VARIABLES.items())]),
        "Both lists are separated by commas. Each word is a plugin's name (`disk`: of every kind, from every "
        "distribution), a distribution (`kvcore-disk`: all its plugins) or both (`disk@kvcore-disk`). Names are "
        "written as they are, with no patterns; of a distribution's, letter case and `-_.` do not matter. What "
        "stands in both lists is blocked. A word that means no installed plugin is warned of.",
    ]
    return "\n\n".join(parts) + "\n"


def plugins() -> str:
    """docs/plugins.md."""
    projects = [tomllib.loads(f.read_text()) for f in sorted(DOCS.parent.glob("plugins/*/pyproject.toml"))]
    ours = ["kvcore", *(p["project"]["name"] for p in projects)]
    registry = Registry(allow=ours)
    missing = set(ours) - {i.distribution for kind in GROUPS for i in registry.available(kind)}
    if missing:
        sys.exit(f"install these first: {', '.join(sorted(missing))}")
    parts = [
        "# Plugins",
        NOTE,
        "What comes with this repository. A built-in is part of `kvcore`; its name is reserved. `kvcore plugins list` "
        "shows what is installed here. From a checkout, `pip install` takes folders instead of these names: "
        "[README](../README.md#serve-a-model).",
    ]
    for kind in GROUPS:
        parts.append(f"## {kind}")
        for info in registry.available(kind):
            if info.distribution not in ours:
                continue
            model = registry.config_model(kind, f"{info.name}@{info.distribution}")
            home = "built in" if info.builtin else f"`pip install {info.distribution}`"
            told = f"[Its arguments](cli.md#kvcore-{info.name})." if kind == "command" else _table(options(model), {})
            parts += [f"### `{info.name}`", f"{_summary(info.module)} ({home})", told]
    return "\n\n".join(p for p in parts if p) + "\n"


def hook_page() -> str:
    """docs/hooks.md."""
    parts = [
        "# Hooks",
        NOTE,
        "A plugin module implements one or more of these functions, marked `@hookimpl` (from `kvcore.api`). Its entry "
        "point stands in the group of its kind, and the entry point's name is the name in YAML. An implementation may "
        "leave out arguments; it must not add any. How to write a plugin: [write-a-plugin.md](write-a-plugin.md).",
        "| group | hook | interface version |\n|---|---|---|\n"
        + "\n".join(f"| `{GROUPS[k]}` | `kvcore_{k}` | {API_VERSIONS[k]} |" for k in KINDS)
        + f"\n| `kvcore.hooks` | observers, `kvcore_observer` and `kvcore_wrap` | {API_VERSIONS['hooks']} |",
    ]
    for name, function in vars(hooks).items():
        if name.startswith("kvcore_"):
            signature = re.sub(r"\b(?:[a-z]+\.)+", "", str(inspect.signature(function)))
            parts += [f"## `{name}{signature}`", _text(function)]
    parts += [
        part
        for told in (ObjectEvent, Span)
        for part in (
            f"## `{told.__name__}`",
            _text(told),
            "Fields: " + ", ".join(f"`{f}`" for f in told._fields) + ".",
        )
    ]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """docs/metrics.md."""
    full = {name: f"`kvcore_{name}{'_total' if spec.kind == 'counter' else ''}`" for name, spec in METRICS.items()}
    rows = [
        f"| {full[name]} | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.help} |"
        for name, spec in METRICS.items()
    ]
    values: dict[tuple[str, str], list[str]] = {}  # a label that means the same in several metrics is told once
    for name, spec in METRICS.items():
        for label, text in spec.labels.items():
            values.setdefault((label, text), []).append(full[name])
    parts = [
        "# Metrics",
        NOTE,
        "Prometheus text, served on 127.0.0.1 when `metrics_port` is set. Under vLLM the same numbers, and the "
        "connector's own, also stand in its `/metrics`, as `vllm:kvcore_...`; under SGLang as `sglang:kvcore_...`. "
        "Dashboard, alert rules and what to ask: [monitoring.md](monitoring.md).",
        "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]).replace("|  |", "| |"),
        "## Values of labels",
        "\n".join(
            [
                "| label | values | of |",
                "|---|---|---|",
                *(f"| `{label}` | {text} | {', '.join(names)} |" for (label, text), names in values.items()),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[Option], defaults: dict[str, str]) -> str:
    rows = list(rows)
    if not rows:
        return "No options."
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in rows:
        default = defaults.get(option.name, "**required**" if option.required else _default(option.default))
        lines.append(f"| `{option.name}` | {option.type} | {default} | {option.description} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _default(value: Any) -> str:
    if value is None:
        return ""
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`" if value != "" else '`""`'


def _summary(module: str) -> str:
    from importlib import import_module

    text = inspect.getdoc(import_module(module)) or ""
    return " ".join(text.split("\n\n")[0].split())


def _text(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "plugins.md": plugins,
    "hooks.md": hook_page,
    "metrics.md": metrics,
    "cli.md": lambda: cli_page.page(NOTE),
    **{f"pictures/{name}.svg": draw for name, draw in pictures.PICTURES.items()},
}


def main() -> int:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        text, path = make(), DOCS / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
