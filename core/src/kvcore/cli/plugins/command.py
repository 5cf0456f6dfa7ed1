"""`kvcore plugins`: list (imports no plugin), show (imports one), check (makes each in a process of its own)."""

import argparse
from typing import Any

from kvcore.api.errors import PluginError
from kvcore.api.hooks import GROUPS
from kvcore.cli.kit.output import paint, print_json, table, track
from kvcore.plugins import PluginInfo, Registry, registry_from_env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `kvcore plugins`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help_text in (
        ("list", "what is installed, from metadata alone"),
        ("show", "one plugin's options, with their defaults"),
        ("check", "import and make each plugin in a process of its own and report what is wrong"),
    ):
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        if name == "show":
            action.add_argument("name", metavar="NAME", help="disk, or disk@kvcore-disk")
        if name == "check":
            action.add_argument("name", metavar="NAME", nargs="?", help="only this one")
            action.add_argument("--quality", action="store_true", help="bronze, silver or gold, and what is missing")
            action.add_argument(
                "--timeout", type=float, default=60.0, metavar="SECONDS", help="for each plugin (default: 60)"
            )
        action.add_argument("--kind", choices=tuple(GROUPS), help="only this kind")
        action.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    registry = registry_from_env()
    return {"list": _list, "show": _show, "check": _check}[args.action](registry, args)


def _list(registry: Registry, args: argparse.Namespace) -> int:
    """Stable JSON: a list of {kind, name, distribution, version, module, builtin, status}; see `PluginInfo`."""
    infos = _installed(registry, args.kind)
    if args.json:
        print_json([info.as_dict() for info in infos])
        return 0
    table(
        ("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS"),
        [(i.kind, i.name, i.distribution, i.version, i.status) for i in infos],
    )
    for problem in registry.problems():
        print(f"{paint('warning:', 'warning')} {problem}")
    return 0


def _show(registry: Registry, args: argparse.Namespace) -> int:
    """JSON: a list of {...as in list, api, options: [{name, type, required, default, description}]}, one for each kind
    that has the name."""
    shown = []
    for info in _named(registry, args.name, args.kind):
        entry: dict[str, Any] = {**info.as_dict(), "api": None, "options": []}
        full = f"{info.name}@{info.distribution}"
        if info.kind != "hooks" or registry.config_model(info.kind, full) is not None:
            from kvcore.config.describe import options

            component = registry.component(info.kind, full)
            entry["api"] = str(component.api)
            entry["options"] = [o._asdict() for o in options(component.config)]
        shown.append(entry)
    if args.json:
        print_json(shown)
        return 0
    for entry in shown:
        api = f", API {entry['api']}" if entry["api"] else ""
        print(f"{entry['kind']} {entry['name']}: {entry['distribution']} {entry['version']} ({entry['module']}){api}")
        if entry["kind"] == "command":
            print(f"kvcore {entry['name']} --help says what it takes")
        elif entry["options"]:
            table(
                ("OPTION", "TYPE", "DEFAULT", ""),
                [(o["name"], _bare(o["type"]), _default(o), _bare(o["description"])) for o in entry["options"]],
            )
        else:
            print("no options")
    return 0


def _check(registry: Registry, args: argparse.Namespace) -> int:
    """JSON: {ok, plugins: [{...as in list, ok, seconds, text}], problems: [text]}. Status 1 when anything is wrong.

    With --quality each plugin also has `level`, which may be null, and `criteria`: [{level, name, met, text}].
    """
    from kvcore.cli.child import call

    infos = _named(registry, args.name, args.kind) if args.name else _installed(registry, args.kind)
    results: list[dict[str, Any]] = []
    for info in track(infos, "checking plugins", quiet=args.json):
        if info.status in ("blocked", "reserved"):
            results.append({**info.as_dict(), "ok": info.status == "blocked", "seconds": 0.0, "text": info.status})
            continue
        task = "quality" if args.quality else "plugin"
        outcome = call(task, info.kind, f"{info.name}@{info.distribution}", timeout_s=args.timeout)
        if outcome.ok and info.status == "clash":
            outcome = outcome._replace(ok=False, text=f"shares its name: select it as {info.name}@{info.distribution}")
        results.append({**info.as_dict(), "ok": outcome.ok, "seconds": round(outcome.seconds, 3), "text": outcome.text})
        if args.quality:
            results[-1] |= outcome.value or {"level": None, "criteria": []}
    problems = registry.problems() if not args.name else []
    ok = all(r["ok"] for r in results) and not problems
    if args.json:
        print_json({"ok": ok, "plugins": results, "problems": problems})
        return 0 if ok else 1
    for r in results:
        mark = paint("ok   ", "ok") if r["ok"] else paint("error", "error")
        level = f" {r['level'] or 'no level'}" if r.get("criteria") else ""
        print(f"{mark} {r['kind']} {r['name']} ({r['distribution']} {r['version']}){level} {r['text']}".rstrip())
        for c in r.get("criteria", ()):
            if args.name or not c["met"]:
                mark = paint("  met   ", "dim") if c["met"] else paint("  missed", "warning")
                print(f"{mark} {c['level']:<6} {c['name']}: {c['text']}")
    for problem in problems:
        print(f"{paint('error', 'error')} {problem}")
    return 0 if ok else 1


def _installed(registry: Registry, kind: str | None) -> list[PluginInfo]:
    return [info for k in GROUPS if kind in (None, k) for info in registry.available(k)]


def _named(registry: Registry, name: str, kind: str | None) -> list[PluginInfo]:
    """Every plugin of that name, whatever its kind unless one is given. Raises `PluginError` when there is none."""
    if kind:
        return [registry.find(kind, name)]
    bare = name.partition("@")[0]
    kinds = [k for k in GROUPS if any(i.name == bare for i in registry.available(k))]
    if kinds:
        return [registry.find(k, name) for k in kinds]
    from kvcore.plugins.known import PACKAGES
    from kvcore.plugins.registry import nearest

    hints = {known: (k, known) for k, known in PACKAGES}
    near = bare if bare in hints else nearest(bare, [i.name for i in _installed(registry, None)] + list(hints))
    for k in GROUPS:
        if near and (any(i.name == near for i in registry.available(k)) or hints.get(near) == (k, near)):
            registry.find(k, name)  # raises, with the spelling and the command that installs it
    raise PluginError(f"no plugin is named {bare!r}; see them with: kvcore plugins list")


def _default(option: dict[str, Any]) -> str:
    if option["required"]:
        return "(required)"
    value = option["default"]
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _bare(text: str) -> str:
    return text.replace("`", "")
