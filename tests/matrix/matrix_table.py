"""The matrix as a table: `python matrix_table.py RESULTS.json README.md` writes it between the marks there."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN = "<!-- The matrix: written by `make matrix` from what the tests have seen. -->"
END = "<!-- The end of the matrix. -->"
ABSENT = "not tested"
LOGPROB_TOLERANCE = 5e-3
"""As closely as float32 allows in batches of another shape."""
TITLES = {
    "disk": "disk",
    "redis": "Redis",
    "s3": "S3",
    "mooncake": "Mooncake",
    "nixl": "NIXL",
    "shelf": "one by `kvcore new-plugin`",
}
NAMES = {"mooncake-transfer-engine-non-cuda": "Mooncake", "nixl-cu12": "NIXL"}
Row = dict[str, str]
"""Column -> text."""


def faults(plain: Any, cold: Mapping[str, Any], hot: Mapping[str, Any]) -> list[str]:
    """What is wrong with a storage under an engine; nothing when it passed."""
    wrong = [f"{phase}: {cell['error']}" for phase, cell in (("cold", cold), ("hot", hot)) if "error" in cell]
    if wrong:
        return wrong
    if plain is not None and not same(cold["outputs"], plain):
        wrong.append("cold: the output is not that without kvcore")
    if not same(hot["outputs"], cold["outputs"]):
        wrong.append("hot: the output is not that of the first process")
    if cold["reused_tokens"] or not cold["stored_objects"]:
        wrong.append(f"cold: reused {cold['reused_tokens']} tokens, stored {cold['stored_objects']} objects")
    if not hot["reused_tokens"] or not hot["loaded_objects"]:
        wrong.append(f"hot: reused {hot['reused_tokens']} tokens, loaded {hot['loaded_objects']} objects")
    for phase, cell in (("cold", cold), ("hot", hot)):
        wrong += [f"{phase}: {what}: {cell[what]}" for what in ("failed", "faults") if cell[what]]
    return wrong


def same(result: Any, reference: Any) -> bool:
    """Are these the same, token by token, and the log probabilities of texts nearly so?"""
    if isinstance(reference, float):
        return abs(result - reference) <= LOGPROB_TOLERANCE
    if isinstance(reference, list):
        return len(result) == len(reference) and all(map(same, result, reference))
    return bool(result == reference)


def row(title: str, passed: str, plain: Any, cold: Mapping[str, Any], hot: Mapping[str, Any]) -> Row:
    """A row of the table, in which cells that passed have this word."""
    reused = {f"{c['reused_tokens']:,} of {c['prompt_tokens']:,}" for c in hot.values() if "error" not in c}
    out = {"engine": title, "prompt tokens reused": " or ".join(sorted(reused)) or "none"}
    for storage, name in TITLES.items():
        if storage not in hot:
            out[name] = ABSENT
        else:
            out[name] = "FAILED" if faults(plain, cold[storage], hot[storage]) else passed
    return out


def versions(stores: Mapping[str, Mapping[str, str]], installed: Mapping[str, str]) -> str:
    """The line below the table: kvcore's version, and of what serves each storage."""
    parts = [f"kvcore {installed['kvcore']}"]
    for storage, parties in stores.items():
        named = ", ".join(f"{NAMES.get(name, name)} {version or installed[name]}" for name, version in parties.items())
        if named:
            parts.append(named if named.startswith(TITLES[storage]) else f"{TITLES[storage]}: {named}")
    return "; ".join(parts) + "."


def differences(told: Row, seen: Row) -> list[str]:
    """Cells of the README that this run would write otherwise."""
    return [
        f"{seen['engine']}, {column}: the README says {told.get(column)!r}, this run {text!r}"
        for column, text in seen.items()
        if text != ABSENT and told.get(column) != text
    ]


def render(rows: list[Row], below: str) -> str:
    """What stands between the marks."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([r[column] for column in head] for r in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n{table}\n\n{below}\n"


def parse(text: str) -> tuple[list[Row], str]:
    """The rows in a README, and the line below them."""
    _, _, rest = text.partition(BEGIN)
    lines = [line for line in rest.partition(END)[0].splitlines() if line]
    if len(lines) < 3:
        return [], ""
    head, _, *body = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line[0] == "|"]
    return [dict(zip(head, line, strict=True)) for line in body], lines[-1]


def main() -> int:
    """Write the table."""
    results, readme = map(Path, sys.argv[1:])
    found = json.loads(results.read_text())
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{readme} does not have these two lines: {BEGIN} {END}")
    readme.write_text(before + BEGIN + "\n" + render(found["rows"], found["below"]) + "\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
