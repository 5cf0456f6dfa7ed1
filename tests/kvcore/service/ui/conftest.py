"""A browser, and a server that has been used, for all tests of the page."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from ui_scene import TOKEN, Scene, chromium, scene

WAIT_MS = 60_000
ANSWERED = "Failed to load resource"
"""So Chromium tells of an answer such as 401, which the page tells in its own words."""


def is_wrong(said: ConsoleMessage) -> bool:
    """Whether the browser complains, such as of something that the page's policy forbids."""
    return said.type == "error" and ANSWERED not in said.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, without a network beyond this machine."""
    with sync_playwright() as p:
        found = p.chromium.launch(executable_path=chromium())
        yield found
        found.close()


@pytest.fixture(scope="module")
def played() -> Iterator[Scene]:
    """A server and what has been asked of it."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder, scene(Path(folder)) as made:
        made.play()
        yield made


@pytest.fixture
def visit(browser: Browser, played: Scene) -> Iterator[Callable[..., Page]]:
    """Opens the page at a view, with the token or without; at the end nothing may have gone wrong in any of them.
    `clock`: its timers run when the test says so."""
    url = played.url
    wrong: list[str] = []
    opened = []

    def open_(view: str = "now", *, token: str | None = TOKEN, clock: bool = False, **context: Any) -> Page:
        opened.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context}))
        page = opened[-1].new_page()
        if clock:
            page.clock.install()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(f"{view}: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
        page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(f"{view} asks {r.url}"))
        page.goto(f"{url}/ui")
        if token is not None:
            page.fill("#token-field", token)
            page.press("#token-field", "Enter")
        page.goto(f"{url}/ui#/{view}")
        page.wait_for_selector(f"main[data-view={view.partition('/')[0]}]")
        return page

    yield open_
    for context in opened:
        context.close()
    assert not wrong
