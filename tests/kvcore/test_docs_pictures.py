"""The pictures of docs/pictures/, which are drawn out of the code. Up to date: test_docs_generated.py."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from docs_blocks import ROOT, pages

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawing

    yield drawing
    del sys.modules["drawing"]


@pytest.mark.parametrize("path", PICTURES, ids=lambda p: p.stem)
def test_a_picture_is_whole_and_says_what_it_shows(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert root.get("role") == "img"
    title = root.find(f"{SVG}title")
    assert title is not None
    assert len(title.text or "") > 20
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")
    assert len(root.findall(f"{SVG}text")) > 5
    assert not re.search(r"href|url\(|@import|<script", path.read_text()), "it loads something"


def test_every_picture_is_shown_with_words_in_its_place() -> None:
    shown: dict[str, list[str]] = {}
    for page in pages():
        for words, name in re.findall(r"!\[([^\]]*)\]\([^)]*pictures/(\w+\.svg)\)", (ROOT / page).read_text()):
            shown.setdefault(name, []).append(words)
    assert set(shown) == {path.name for path in PICTURES}
    assert all(len(words) > 20 for said in shown.values() for words in said)


def test_words_that_do_not_fit_are_an_error(drawing: ModuleType) -> None:
    made = drawing.Drawing(200, 100, "A picture for this test.")
    made.box(drawing.Box(10, 10, 100, 30), ["short"])
    with pytest.raises(ValueError, match="does not fit"):
        made.box(drawing.Box(10, 10, 100, 30), ["much too long for its box"])
    with pytest.raises(ValueError, match="do not fit"):
        made.box(drawing.Box(10, 10, 100, 30), ["two", "lines"])
    with pytest.raises(ValueError, match="does not fit"):
        made.text(150, 20, "over the edge of it")
