"""Every test that docs/reliability.md and docs/security.md name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:\w+/)*\w+\.py)?(?:::(test_\w+))?`")


@pytest.mark.parametrize(("page", "least"), [("reliability.md", 40), ("security.md", 40)])
def test_every_test_that_is_named_exists(page: str, least: int) -> None:
    folder, seen, wrong = "", 0, []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if head := re.search(r"`(kvcore[\w/]*)/` \|$", line):
            folder = head[1]
        for file, test in NAMED.findall(line):
            if not file and not test:
                continue
            seen += 1
            if file:
                path = ROOT / "tests" / (file if "/" in file else f"{folder}/{file}")
                texts = [path.read_text()] if path.is_file() else []
            else:
                texts = [p.read_text() for p in (ROOT / "tests" / folder).glob("test_*.py")]
            if not texts or (test and not any(f"def {test}(" in text for text in texts)):
                wrong.append(line)
    assert seen > least
    assert not wrong


def test_no_promise_of_security_goes_without_a_test() -> None:
    rows, promises = (ROOT / "docs" / "security.md").read_text().splitlines(), False
    seen = 0
    for row in rows:
        promises = row == "| promise | test |" or (promises and row.startswith("|"))
        if promises and row.startswith("| ") and row != "| promise | test |":
            seen += 1
            assert NAMED.search(row.rpartition(" | ")[2]), row
    assert seen > 20
