"""The blocks of the documentation's pages, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/*.md", "core/*.md", "plugins/*/*.md", "examples/*/*.md", "benchmarks/*.md")
GENERATED = "<!-- Written by docs/generate.py"
"""A page with this is the sources' own words: test_docs_generated.py."""
LANGUAGES = ("", "console", "sh", "bash")
"""Of blocks that hold commands."""
_ENDS = (";", "&&", "|", "||", ">", "<", "&")


class Block(NamedTuple):
    """One fenced or indented block, where it stands."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """Its first line, without a prompt."""
        return next((line for line in self.text.splitlines() if line.strip()), "").strip().removeprefix("$ ")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


def pages() -> list[str]:
    """All that people write, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))


def blocks(page: str) -> list[Block]:
    """A page's blocks; none of a generated page."""
    text = (ROOT / page).read_text()
    if GENERATED in text:
        return []
    tokens = [t for t in MarkdownIt().parse(text) if t.type in ("fence", "code_block")]
    return [Block(page, (t.map or [0])[0] + 1, t.info.strip(), t.content) for t in tokens]


def spans(page: str) -> list[str]:
    """Code within the prose and the tables of a page."""
    parsed = MarkdownIt().enable("table").parse((ROOT / page).read_text())
    return [child.content for token in parsed for child in token.children or () if child.type == "code_inline"]


class Unreadable(ValueError):
    """A block is not a list of commands."""


def lines(page: str, *starts: str) -> list[str]:
    """The command lines of a page that begin so, as a shell takes them: what is assigned before a command, and where
    it writes to, is in them."""
    found = [line for b in blocks(page) if b.language in LANGUAGES for line in _readable(b)]
    return [line for line in found if line.startswith(starts or "")]


def commands(block: Block) -> list[list[str]]:
    """Its commands in words, without what is assigned before them; a line's comment and redirections are left out.

    Raises `Unreadable` where a quote stays open, or where something else stands among lines with a prompt.
    """
    return [command for line in _lines(block) for command in _apart(_words(line) or [])]


def _readable(block: Block) -> list[str]:
    try:
        return list(_lines(block))
    except Unreadable:
        return []


def _lines(block: Block) -> Iterator[str]:
    rest = iter(block.text.splitlines())
    prompted = any(line.startswith("$ ") for line in block.text.splitlines())
    for line in rest:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if prompted and not line.startswith("$ "):
            raise Unreadable(f"{block.page}:{block.line}: {line!r} is no command")
        whole = line.removeprefix("$ ").strip()
        while _words(whole) is None or whole.endswith("\\"):
            more = next(rest, None)
            if more is None:
                raise Unreadable(f"{block.page}:{block.line}: a quote or a backslash is open at the end")
            whole = f"{whole[:-1]}{more.lstrip()}" if whole.endswith("\\") else f"{whole}\n{more}"
        yield whole


def _words(text: str) -> list[str] | None:
    lexer = shlex.shlex(text.removesuffix("\\"), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:
        return None


def _apart(words: list[str]) -> Iterator[list[str]]:
    """Single commands, without what is assigned before them and where they write to."""
    command: list[str] = []
    named = False  # by a redirection: a file
    for word in [*words, ";"]:
        if word not in _ENDS:
            if not named:
                command.append(word)
            named = False
            continue
        named = word in (">", "<")
        if named:
            continue
        while command and re.fullmatch(r"\w+=.*", command[0], re.S):
            command.pop(0)
        if command:
            yield command
        command = []
