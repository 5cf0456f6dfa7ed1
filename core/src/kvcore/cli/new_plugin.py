"""`kvcore new-plugin`: a package that works and passes its own tests, to start from."""

import argparse
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import NamedTuple

from kvcore import __version__
from kvcore.api.errors import KVCoreError
from kvcore.api.hooks import API_VERSIONS
from kvcore.cli.kit.output import lines, print_json
from kvcore.plugins import registry_from_env
from kvcore.plugins.known import BUILTINS, PACKAGES

MAX_NAME = 24
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class _Kind(NamedTuple):
    """What differs between the kinds beside their own files: the class's suffix, whether it has options, the words, and
    what it offers, where that has another name than the kind."""

    suffix: str
    config: bool
    summary: str
    yaml: str
    offer: str = ""


_KINDS: dict[str, _Kind] = {
    "storage": _Kind(
        "Storage",
        True,
        "A storage of kvcore that keeps objects as files",
        "l2:\n  - storage: {plugin: $name, path: /var/cache/$name}",
    ),
    "serde": _Kind("Serde", True, "A serde of kvcore that compresses", "l2:\n  - storage: memory\n    serde: [$name]"),
    "eviction": _Kind("Policy", False, "An eviction policy of kvcore", "l1:\n  size: 8GiB\n  eviction: $name"),
    "keys": _Kind("Keys", False, "A key generator of kvcore", "keys: $name"),
    "hooks": _Kind(
        "Observer", True, "An observer of kvcore that counts objects", "hooks:\n  - plugin: $name", "observer"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvcore new-plugin`."""
    parser.add_argument("kind", choices=tuple(_KINDS), help="what it is")
    parser.add_argument("name", metavar="NAME", help="its name in YAML, such as my-store; the package is kvcore-NAME")
    parser.add_argument("--path", type=Path, default=Path(), metavar="DIR", help="where to put it (default: here)")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """JSON: {kind, name, distribution, module, path, files: [path below it]}. Overwrites nothing."""
    check_name(args.kind, args.name)
    distribution = f"kvcore-{args.name}"
    root: Path = args.path / distribution
    contents, made = render(args.kind, args.name), False
    try:
        args.path.mkdir(parents=True, exist_ok=True)
        root.mkdir()
        made = True
        for path, text in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            with (root / path).open("x") as file:
                file.write(text)
    except FileExistsError as e:
        raise KVCoreError(f"{e.filename} is there already: nothing is overwritten; choose another --path") from e
    except OSError as e:
        if made:
            shutil.rmtree(root, ignore_errors=True)
        raise KVCoreError(f"{e.filename or root} cannot be written: {e.strerror}; choose another --path") from e
    if args.json:
        facts = {"kind": args.kind, "name": args.name, "distribution": distribution, "module": _module(args.name)}
        print_json({**facts, "path": str(root), "files": sorted(contents)})
        return 0
    print(f"{root}: {len(contents)} files; it works as it is. Next:")
    lines(
        f"  {line}"
        for line in (
            f"cd {root}",
            'pip install -e ".[test]"',
            "pytest",
            f"kvcore plugins check {args.name} --quality",
            f"edit src/{_module(args.name)}/{_KINDS[args.kind].offer or args.kind}.py",
        )
    )
    return 0


def check_name(kind: str, name: str) -> None:
    """Raises `KVCoreError` for a name that no new plugin of this kind can have."""
    if name.startswith("kvcore-"):
        raise KVCoreError(f"{name!r}: write {name.removeprefix('kvcore-')!r}, the package gets its `kvcore-` by itself")
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise KVCoreError(
            f"{name!r} is no name: use lowercase letters, digits and single dashes, a letter first, "
            f"at most {MAX_NAME} characters, such as my-store"
        )
    if name in BUILTINS.get(kind, {}):
        raise KVCoreError(f"{name!r} is a built-in {kind} of kvcore, and such names are reserved: choose another")
    if f"kvcore-{name}" in PACKAGES.values():
        raise KVCoreError(f"'kvcore-{name}' is a package of kvcore's own: choose another name")
    taken = [i for i in registry_from_env().available(kind) if i.name == name]
    if taken:
        raise KVCoreError(f"{name!r} is the name of an installed {kind} plugin, {taken[0].label}: choose another")


def render(kind: str, name: str) -> dict[str, str]:
    """The files of the package: path -> text."""
    facts, cls = _KINDS[kind], "".join(part.capitalize() for part in name.split("-"))
    factory, config = cls + facts.suffix, f"{cls}Config"
    major, minor = __version__.split(".")[:2]
    values = {
        "api": f"{API_VERSIONS[kind].major}, {API_VERSIONS[kind].minor}",
        "cls": cls,
        "component": f"config={config}, factory={factory}" if facts.config else f"factory={factory}",
        "core": f"kvcore>={major}.{minor},<{int(major) + 1}",
        "dist": f"kvcore-{name}",
        "exports": f"{config}, {factory}" if facts.config else factory,
        "kind": kind,
        "module": _module(name),
        "name": name,
        "offer": facts.offer or kind,
        "summary": facts.summary,
        "variable": name.replace("-", "_"),
        "yaml": Template(facts.yaml).substitute(name=name),
    }
    templates = files("kvcore.cli") / "templates"
    return {
        path.removesuffix(".in").replace("NAME", name.replace("-", "_")): Template(text).substitute(values)
        for folder in ("common", kind)
        for path, text in _walk(templates / folder)
    }


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Path below `folder` and text of every template."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_text("utf-8")


def _module(name: str) -> str:
    return f"kvcore_{name.replace('-', '_')}"
