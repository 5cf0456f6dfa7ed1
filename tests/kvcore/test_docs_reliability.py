"""Every test that docs/reliability.md and docs/security.md name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:\w+/)*\w+\.py)?(?:::(test_\w+))?`")


def test_every_test_that_is_named_exists() -> None:
    folder, seen, wrong = "", 0, []
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines():
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
    assert seen > 40
    assert not wrong


def test_every_promise_of_security_is_linked_to_tests_that_exist() -> None:
    promises, seen = False, 0
    for row in (ROOT / "docs" / "security.md").read_text().splitlines():
        if row == "| promise | test |":
            promises = True
        elif promises and row.startswith("| "):
            links = re.findall(r"\[`(\w+)(\.py)?`\]\(\.\./(tests/[\w/]+\.py)\)", row.rpartition(" | ")[2])
            assert links, f"no test holds this: {row}"
            for name, whole, file in links:
                text = (ROOT / file).read_text()
                assert Path(file).stem == name if whole else f"def {name}(" in text, f"{file} has no {name}"
                seen += 1
        else:
            promises = promises and row.startswith("|")
    assert seen > 40
