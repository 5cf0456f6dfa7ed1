"""Makes the pictures of docs/ui.md: `python tests/kvcore/service/ui/ui_pictures.py docs/ui`; with `all` behind it, of
every view, light and dark.

It takes two minutes and more, for a history to show. The pictures are drawn with the fonts of the machine.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from ui_scene import TOKEN, Scene, chromium, scene

SHOWN = {
    "now": "now", "history": "history", "requests": "requests", "explain": "requests/{part}", "prefixes": "prefixes",
    "objects": "objects/disk", "plugins": "plugins", "config": "config",
}  # fmt: skip
KEPT = (("now", "light"), ("now", "dark"), ("explain", "light"), ("prefixes", "dark"), ("history", "light"))
"""The pictures of the documentation."""
EVERY = tuple((view, theme) for theme in ("light", "dark") for view in SHOWN)
PLAYED_S = 120.0


def main(out: Path, pictures: Sequence[tuple[str, str]], seconds: float = PLAYED_S) -> None:
    """Play a scene for a while, and take these pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kv") as folder, scene(Path(folder)) as played, sync_playwright() as p:
        played.play()
        browser = p.chromium.launch(executable_path=chromium())
        watch(played, seconds)
        for theme in ("light", "dark"):
            take(browser, played, theme, out, [view for view, t in pictures if t == theme])
        browser.close()


def watch(played: Scene, seconds: float) -> None:
    """More requests, some of them for what is there, now more and now fewer."""
    dice, end, n = random.Random(7), time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        busy = 1.5 if int(left / 20) % 2 else 0.4
        talk = dice.choice(["weather", "recipes", "law", "law", f"talk {n // 3}", f"talk {n}"])
        played.ask(played.chat, played.alice, ["system"] * 6 + [talk] * dice.randint(4, 19), f"{n}")
        if dice.random() < 0.4:
            words = ["handbook"] * 10 + [f"document {dice.randint(0, 6)}"] * 12 + [f"question {n}"] * 2
            played.ask(played.batch, played.bob, words, f"batch-{n}")
        time.sleep(dice.expovariate(4 * busy))
        n += 1


def take(browser: Browser, played: Scene, theme: str, out: Path, views: Sequence[str]) -> None:
    """Some views in one theme."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{played.url}/ui")
    page.fill("#token-field", TOKEN)
    page.press("#token-field", "Enter")
    for name in views:
        address = SHOWN[name]
        page.goto(f"{played.url}/ui#/{address.format(**played.requests)}")
        page.wait_for_selector(f"main[data-view={address.partition('/')[0]}] .part")
        watch(played, 6 if name == "now" else 0.3)
        page.screenshot(path=out / f"{name}-{theme}.png", full_page=name in ("now", "explain"))
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), EVERY if sys.argv[2:] == ["all"] else KEPT)
