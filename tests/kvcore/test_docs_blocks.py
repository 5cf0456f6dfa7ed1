"""Every block of every page is run by a test, checked here, or named with its reason in docs_blocks.yaml."""

import json
import re
from pathlib import Path

import pytest
import yaml
from docs_named import there

import docs_blocks
from docs_blocks import LANGUAGES, ROOT, Block, Unreadable, blocks, commands, pages, spans
from kvcore.cli.app import _parser
from kvcore.cli.extra import NoSuchCommand
from kvcore.config import load_config
from kvcore.plugins import Registry

TESTS = ROOT / "tests"
LIST = yaml.safe_load((Path(__file__).parent / "docs_blocks.yaml").read_text())
TESTED: dict[str, dict[str, str]] = LIST["tested"]
EVERYWHERE: dict[str, str] = LIST["everywhere"]
CHECKED: dict[str, str] = LIST["checked"]
SHOWN: dict[str, dict[str, str]] = LIST["shown"]
PAGES = pages()


def fits(block: Block, rows: dict[str, str]) -> list[str]:
    """The keys of a list that mean a block."""
    return [key for key in rows if key == f"<{block.language}>" or block.first.startswith(key)]


def reasons(words: list[str]) -> list[str]:
    """The keys of EVERYWHERE and CHECKED that mean a command."""
    text = " ".join([{"python3": "python"}.get(Path(words[0]).name, Path(words[0]).name), *words[1:]])
    return [key for key in (*EVERYWHERE, *CHECKED) if text == key or text.startswith((f"{key} ", f"{key}/"))]


def in_list(text: str, page: str) -> list[str]:
    """The keys of TESTED that mean a command of a page."""
    return [key for key in TESTED.get(page, {}) if text.startswith(key)]


def why(block: Block) -> str:
    """What is wrong with how a block is treated, "" when nothing is."""
    if f"<{block.language}>" in TESTED.get(block.page, {}) or fits(block, SHOWN.get(block.page, {})):
        return ""
    if block.language in ("yaml", "json"):
        return ""  # by the tests below
    advice = "run it in a test and say so in tests/kvcore/docs_blocks.yaml, or say there why not"
    if block.language not in LANGUAGES:
        known = fits(block, TESTED.get(block.page, {}))
        return "" if known else f"{block}: nobody tests this {block.language}: {advice}"
    try:
        found = {" ".join(words): words for words in commands(block)}
    except Unreadable as error:  # a session with what it prints
        return "" if fits(block, TESTED.get(block.page, {})) else f"{error}: {advice}"
    unknown = [text for text, words in found.items() if not reasons(words) and not in_list(text, block.page)]
    return f"{block}: nobody tests `{unknown[0]}`: {advice}" if unknown else ""


# -- the list --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_tested_or_has_its_reason(page: str) -> None:
    assert [fault for fault in map(why, blocks(page)) if fault] == []


def test_a_new_block_is_found() -> None:
    def block(language: str, text: str) -> Block:
        return Block("docs/server.md", 1, language, text)

    assert "nobody tests `kvcored --now`" in why(block("", "kvcored --now\n"))
    assert "nobody tests this rust" in why(block("rust", "fn main() {}\n"))
    assert "is no command" in why(block("console", "$ make demo\nall is well\n"))
    assert "open at the end" in why(block("", "kvcore run 'vllm\n"))
    assert why(block("", "make demo; pip install kvcore > log\n")) == ""


def test_every_line_of_the_list_means_something() -> None:
    every = {page: blocks(page) for page in PAGES}
    for rows in (TESTED, SHOWN):
        for page, keys in rows.items():
            left = set(keys) - {key for block in every[page] for key in (*fits(block, keys), *meant(block))}
            assert not left, f"docs_blocks.yaml: {page} has no block that begins with {left}"
    used = {key for found in every.values() for block in found for key in meant(block)}
    assert {*EVERYWHERE, *CHECKED} - used == set(), "docs_blocks.yaml: no page has these commands"


def meant(block: Block) -> set[str]:
    """The keys of all lists that mean a command of a block."""
    try:
        found = commands(block) if block.language in LANGUAGES else []
    except Unreadable:
        return set()
    return {key for words in found for key in (*reasons(words), *in_list(" ".join(words), block.page))}


@pytest.mark.parametrize("page", TESTED)
def test_the_tests_that_are_named_read_the_page(page: str) -> None:
    name = Path(page).parent.name if Path(page).name == "README.md" and Path(page).parent.name else Path(page).name
    for named in TESTED[page].values():
        text = source(named)
        assert name in text or page in text, f"{named} does not read {page}"


@pytest.mark.parametrize("named", sorted(set(EVERYWHERE.values())))
def test_those_for_all_pages_read_all_pages(named: str) -> None:
    assert "pages()" in source(named)


def source(named: str) -> str:
    """The text of a file of tests, in which the test that is named, if one is, stands."""
    file, _, test = named.partition("::")
    text = (TESTS / file).read_text()
    assert not test or f"def {test}(" in text, f"{file} has no {test}"
    return text


# -- what is checked here --------------------------------------------------------------------------------------------

CONFIGURATIONS = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml" and not fits(block, TESTED.get(page, {})) and not fits(block, SHOWN.get(page, {}))
]


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=lambda b: f"{b.page}:{b.first[:40]}")
def test_every_yaml_is_a_configuration(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the part of one that the page is about."""
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"file:([\w./-]+)", block.text):  # keys that are to be there
        assert name.startswith("/etc/")
    values = yaml.safe_load(block.text)
    values.setdefault("l2", [])
    for program in values.get("plugins", {}).get("run", ()):
        path = Path(program["path"] if isinstance(program, dict) else program)
        if not path.is_absolute():
            path.touch()
    (tmp_path / "kvcore.yaml").write_text(yaml.safe_dump(values))
    registry = Registry()
    config = load_config(str(tmp_path / "kvcore.yaml"), env={}, registry=registry)
    registry.use_hooks(config.hooks)


@pytest.mark.parametrize("page", PAGES)
def test_every_json_is_json(page: str) -> None:
    for block in blocks(page):
        if block.language == "json":
            assert json.loads(block.text)


@pytest.mark.parametrize("page", PAGES)
def test_what_commands_name_is_there(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page):
        if block.language not in LANGUAGES or fits(block, SHOWN.get(page, {})):
            continue
        try:
            found = commands(block)
        except Unreadable:
            continue  # a session with what it prints: why() has asked for its test
        for words in found:
            try:
                there(words)
            except SystemExit:
                pytest.fail(f"{block}: {' '.join(words)}: {capsys.readouterr().err}")
            except NoSuchCommand as e:
                if not in_list(" ".join(words), page):  # else the page's own plugin brings it
                    pytest.fail(f"{block}: {e}")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_prose_exist(page: str) -> None:
    for span in spans(page):
        words = span.split()
        if len(words) < 2 or words[0] != "kvcore" or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
            continue
        options = {w.partition("=")[0] for w in words[: words.index("--") if "--" in words else None] if w[:2] == "--"}
        try:
            known, text = set(), [_parser(words[1])[0]]
        except NoSuchCommand as e:
            pytest.fail(f"{page}: `{span}`: {e}")
        while text:
            for action in text.pop()._actions:
                known |= set(action.option_strings)
                text += list(action.choices.values()) if isinstance(action.choices, dict) else []
        assert options <= known, f"{page}: `{span}`: {options - known}"


def test_what_is_not_run_is_told() -> None:
    """docs/versions.md"""
    table = re.findall(r"^\| `([^`]*)` \| (.*) \|$", (ROOT / "docs" / "versions.md").read_text(), re.M)
    assert [row for row in table if row[0] in CHECKED] == list(CHECKED.items())


def test_pages_are_those_of_the_site() -> None:
    assert "docs/server.md" in PAGES
    assert "plugins/storage_disk/README.md" in PAGES
    assert len(PAGES) > 40
    assert docs_blocks.blocks("docs/configuration.md") == []
