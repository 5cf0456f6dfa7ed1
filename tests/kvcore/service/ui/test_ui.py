"""The page in a real browser: every view, light and dark, for everybody, without a token, and when the server goes."""

import re
from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from ui_scene import TOKEN, Scene

Visit = Callable[..., Page]
VIEWS = ("now", "history", "requests", "prefixes", "objects/disk", "plugins", "config")
expect.set_options(timeout=60_000)


@pytest.mark.parametrize(("theme", "rules"), [("light", None), ("dark", ["color-contrast"])], ids=["light", "dark"])
def test_every_view_is_there_and_accessible(visit: Visit, played: Scene, theme: str, rules: list[str] | None) -> None:
    page = visit(color_scheme=theme)
    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    explained = f"requests/{played.requests['part']}"
    for view in (*VIEWS, explained) if theme == "light" else ("now", "history", "prefixes", explained):
        page.goto(f"{played.url}/ui#/{view}")
        page.wait_for_selector(f"main[data-view={view.partition('/')[0]}] .part")
        expect(page.locator("h1")).to_have_count(1)
        expect(page.locator("nav a[aria-current=page]")).to_have_count(1)
        found = Axe().run(page, options=options).response
        assert found["passes"]
        told = [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in found["violations"]]
        assert not told, (view, told)


def test_now_shows_what_goes_on(visit: Visit, played: Scene) -> None:
    page = visit("now")
    expect(page.locator("main")).to_contain_text("tier cold is down")
    expect(page.get_by_role("region", name="Engines")).to_contain_text("vllm-chat")
    expect(page.get_by_role("region", name="Tenants")).to_contain_text("alice")
    expect(page.get_by_role("region", name="Hottest prefixes")).to_contain_text("Qwen/Qwen3-8B")
    lookups = page.locator(".tile", has_text="Lookups")
    before = re.search(r"([\d,]+) since start", lookups.inner_text())
    assert before
    played.ask(played.chat, played.alice, ["system"] * 6, "once more")
    wanted = f"{int(before[1].replace(',', '')) + 1:,} since start"
    expect(lookups).to_contain_text(wanted)


def test_a_request_is_explained(visit: Visit, played: Scene) -> None:
    page = visit("requests")
    page.fill("#request", "-fresh")
    page.press("#request", "Enter")
    expect(page.locator("main h2")).to_contain_text([played.requests["never"]])
    page.get_by_role("link", name="All requests").click()
    page.get_by_role("link", name=played.requests["never"]).click()
    expect(page.locator(".answer")).not_to_be_empty()
    expect(page.locator(".facts")).to_contain_text("9 whole chunks of 128 tokens")
    assert page.locator(".chain span").count() == 9


def test_names_are_text_whatever_they_are(visit: Visit, played: Scene) -> None:
    page = visit("requests")
    page.get_by_role("link", name=played.requests["odd"][:20]).click()
    expect(page.locator("main h2").nth(0)).to_have_text(played.requests["odd"])
    assert page.locator("main img").count() == 0
    page.goto(f"{played.url}/ui#/requests/100%")
    expect(page.locator("main")).to_contain_text("no request '100%'")


def test_prefixes_are_a_tree(visit: Visit) -> None:
    page = visit("prefixes")
    page.select_option("select", label=re.search(r"Qwen/Qwen3-8B, bob.*\)", page.locator("select").inner_text())[0])  # type: ignore[index]
    tree = page.locator(".tree > ul")
    root = tree.locator("> li").filter(has_text="chunks 1 to 10")
    expect(root).to_have_count(1)
    document = root.locator("> details > ul > li", has_text="chunks 11 to 22").first
    expect(document).to_contain_text("3")
    fold = root.locator("> details > summary")
    fold.focus()
    page.keyboard.press("Enter")
    expect(document).to_be_hidden()


def test_objects_are_where_they_are(visit: Visit) -> None:
    page = visit("objects")
    expect(page.locator("main")).to_contain_text("In host memory")
    page.get_by_label("Place").select_option("disk")
    expect(page.locator("main")).to_contain_text("In disk")
    rows = page.locator("[data-object]")
    assert rows.count() == 100
    page.get_by_role("button", name="More").click()
    expect(rows.nth(100)).to_be_visible()
    rows.nth(0).click()
    expect(page.locator("#place")).to_contain_text("disk")


def test_plugins_and_the_configuration_without_secrets(visit: Visit) -> None:
    page = visit("plugins")
    expect(page.get_by_role("region", name="Storages")).to_contain_text("kvcore-disk")
    page.get_by_role("link", name="Configuration").click()
    expect(page.locator("main")).to_contain_text("server.http.token")
    assert TOKEN not in page.content()
    page.get_by_label("Without defaults").check()
    page.get_by_label("Find").fill("chunk_tokens")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("kvcore.yaml:")


def test_without_a_token_the_page_asks_for_it(visit: Visit) -> None:
    page = visit("now", token=None)
    expect(page.locator("main")).to_contain_text("Host memory (L1)")
    expect(page.locator("main")).to_contain_text("Shown with the server's token.")
    page.get_by_role("link", name="Objects").click()
    page.get_by_role("link", name="give it above").click()
    expect(page.locator("#token-field")).to_be_focused()
    page.keyboard.type("not the one that it is")
    page.keyboard.press("Enter")
    expect(page.locator("#token-said")).to_have_text("That is not the server's token.")
    expect(page.locator("main")).to_contain_text("This needs the server's token")
    expect(page.locator("#token-field")).to_be_focused()
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("In host memory")
    expect(page.locator("#token-said")).to_have_text("")
    assert TOKEN not in page.content() + page.url
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    expect(page.locator("main")).to_contain_text("In host memory")
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("main")).to_contain_text("This needs the server's token")


def test_it_fits_a_telephone_and_changes_its_theme(visit: Visit, played: Scene) -> None:
    page = visit("now", viewport={"width": 360, "height": 740})
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(ground) != light
    for view in VIEWS:
        page.goto(f"{played.url}/ui#/{view}")
        page.wait_for_selector(f"main[data-view={view.partition('/')[0]}] .part")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


def test_it_goes_on_when_the_server_does(visit: Visit, played: Scene) -> None:
    page, other = visit("now", clock=True), visit("plugins", clock=True)
    expect(page.locator(".tiles")).to_be_visible()
    played.server.kill()
    page.clock.run_for(6_000)
    expect(page.locator("main")).to_contain_text("The server does not answer")
    expect(page.locator("#health")).to_have_text("away")
    other.get_by_role("link", name="Configuration").click()
    expect(other.locator("main")).to_contain_text("The server does not answer")
    played.server.start()
    page.clock.run_for(6_000)
    expect(page.locator(".tiles")).to_be_visible()
    expect(page.locator("#health")).to_have_text("ok")
    other.clock.run_for(4_000)
    expect(other.locator("main")).to_contain_text("chunk_tokens")


def test_nothing_runs_while_nobody_looks(visit: Visit) -> None:
    page = visit("now", clock=True)
    expect(page.locator(".tiles")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.clock.run_for(6_000)
    page.evaluate("fetch('healthz').then((r) => r.text())")
    assert len(asked) > 1
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    for _ in range(3):  # what was due; then nothing
        del asked[:]
        page.clock.run_for(20_000)
        page.evaluate("fetch('healthz').then((r) => r.text())")  # behind all that was asked
    assert [url.rpartition("/")[2] for url in asked] == ["healthz"]
