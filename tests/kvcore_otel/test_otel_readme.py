"""The README names every span and attribute that there is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE_IN = ("engine/traced.py", "engine/prefetch.py", "l2/traced.py", "observe/spans.py")


def test_every_name_is_told() -> None:
    sources = "".join((ROOT / "core/src/kvcore" / name).read_text() for name in MADE_IN)
    names = set(re.findall(r'"(kvcore\.[a-z_.]+)[{"]', sources)) | {"kvcore.broke", "kvcore.blame"}
    told = (ROOT / "plugins/hooks_otel/README.md").read_text()
    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}" not in told] == []
    calls = {f"kvcore.tier.{call}" for call in re.findall(r'self\._(?:begin|spanned)\("(\w+)"', sources)}
    assert len(calls) == 3
    spans = set(re.findall(r"`(kvcore\.[a-z_.]+)`", "".join(re.findall(r"^\| (`.*?) \|", told, re.M))))
    assert calls <= spans <= calls | names
