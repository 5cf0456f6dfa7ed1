"""What a command of the documentation names in this repository is there: files, make's targets, packages and their
extras, options. Raises `AssertionError`; `SystemExit` for a command of kvcore's that its parser refuses."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from docs_blocks import ROOT
from kvcore.cli.app import _cut, _parser


def there(words: list[str]) -> None:
    """A command, in words."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "kvcore":
        parsed(words)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            name, is_value, _ = word.partition("=")
            assert re.search(rf"^{name} \?=" if is_value else rf"^{name}:", makefile, re.M), word
    elif program == "pip":
        packages(rest[1:])
    elif program in ("python", "python3") and rest[0].endswith(".py"):
        script = ROOT / rest[0]
        assert script.is_file(), rest[0]
        known = {s for file in (*script.parent.glob("*.py"), *ROOT.glob("examples/common/*.py")) for s in strings(file)}
        assert {w.partition("=")[0] for w in rest[1:] if w.startswith("--")} <= known, words
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/")), words
    elif program in ("vllm", "lmcache", "kubectl", "docker", "cp", "trtllm-serve"):
        for word in rest:
            if word.startswith("{"):
                assert json.loads(word), word
            elif word.startswith("examples/"):
                assert list(ROOT.glob(word)), word


def parsed(words: list[str]) -> None:
    """A command of kvcore's, by its own parser."""
    made, command = parser(words[1] if len(words) > 1 and not words[1].startswith("-") else "")
    given = ["0" * 32 if word in ("NAMESPACE", "PREFIX") else word for word in words[1:]]
    if getattr(command, "words_follow", False):
        given, _ = _cut(given)
    _, unknown = made.parse_known_args(given)
    assert not unknown, f"kvcore does not know {unknown}"


def packages(words: list[str]) -> None:
    """Folders with a package, or names of ours, and their extras."""
    ours = {}
    for file in (ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        name = re.search(r'^name = "(.*)"$', file.read_text(), re.M)
        assert name
        ours[name[1]] = file
    for word in words:
        name, _, extras = word.partition("[")
        if name.startswith("./"):
            file = ROOT / name / "pyproject.toml"
            assert file.is_file(), word
        elif name.startswith("kvcore"):
            assert name in ours, word
            file = ours[name]
        else:
            continue
        for extra in filter(None, extras.rstrip("]").split(",")):
            assert re.search(rf"^{extra} = \[", file.read_text(), re.M), word


@cache
def parser(command: str) -> Any:
    return _parser(command)


@cache
def strings(file: Path) -> set[str]:
    found = (n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant))
    return {value for value in found if isinstance(value, str)}
