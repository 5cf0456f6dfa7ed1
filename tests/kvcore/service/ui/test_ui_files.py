"""The page's files: all are there, none asks for anything from elsewhere, and the headers would not let it."""

import re
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import pytest
from ui_pictures import KEPT
from ui_scene import Scene

from kvcore.service.http import ui


def get(url: str) -> tuple[bytes, dict[str, str]]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read(), {k.lower(): v for k, v in answer.getheaders()}


def test_every_file_is_served_as_it_is(played: Scene) -> None:
    folder = files(ui.__name__)
    assert sorted(ui.FILES) == sorted(f.name for f in folder.iterdir() if f.is_file() and not f.name.endswith(".py"))
    for name in ui.FILES:
        body, headers = get(f"{played.url}/ui/{name}")
        assert body == (folder / name).read_bytes()
        assert headers["content-security-policy"] == ui.POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert get(f"{played.url}/ui")[0] == (folder / "index.html").read_bytes() == get(f"{played.url}/")[0]


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2f__init__.py", "%2e%2e%2fapp.py"])
def test_nothing_else_is(played: Scene, name: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{played.url}/ui/{name}")
    assert caught.value.code == 404
    caught.value.close()


def test_nothing_comes_from_elsewhere_and_no_script_stands_in_the_page() -> None:
    for name in ui.FILES:
        text = (files(ui.__name__) / name).read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|eval\(|Function\(|localStorage", text), name
    page = (files(ui.__name__) / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    assert "unsafe" not in ui.POLICY


def test_the_documentation_names_every_view_and_shows_pictures() -> None:
    page = (Path(__file__).parents[4] / "docs/ui.md").read_text()
    scripts = [(files(ui.__name__) / name).read_text() for name in ui.FILES if name.endswith(".js")]
    titles = [title for text in scripts for title in re.findall(r'^export const title = "(\w+)"', text, re.M)]
    assert len(titles) == 7
    assert [title for title in titles if f"| **{title}** |" not in page] == []
    shown = re.findall(r"!\[.+\]\(ui/(\S+)\.png\)", page)
    assert sorted(shown) == sorted(f"{view}-{theme}" for view, theme in KEPT)


def test_each_is_small() -> None:
    sizes = {name: len((files(ui.__name__) / name).read_bytes()) for name in ui.FILES}
    assert sum(sizes.values()) < 80_000, sizes
