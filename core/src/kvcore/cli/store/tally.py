"""What became of the objects of a pass: counted all, named where something is wrong."""

from collections import Counter
from typing import Any

from kvcore.api import ObjectKey, format_size
from kvcore.cli.kit.progress import Progress

MOST_NAMED = 1000
"""So many objects are named in JSON; more are counted."""


class Tally:
    """Objects and bytes by state.

    Args:
        progress: moves on with every object that is counted once.
        as_json: objects are named in the result instead of on stdout.
    """

    def __init__(self, progress: Progress, *, as_json: bool) -> None:
        self._progress = progress
        self._as_json = as_json
        self._objects: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._named: list[dict[str, Any]] = []

    def __getitem__(self, state: str) -> int:
        return self._objects[state]

    def add(self, state: str, nbytes: int, *, moved: bool = True) -> None:
        """One object more. `moved`: the first word on it, so the pass has moved on."""
        self._objects[state] += 1
        self._bytes[state] += nbytes
        if moved:
            self._progress.add(1, nbytes)

    def name(self, key: ObjectKey, nbytes: int, state: str, reason: str) -> None:
        """Say what is the matter with an object."""
        if not self._as_json:
            self._progress.say(f"{state:<8} {key.name}  {format_size(nbytes)}  {reason}")
        elif len(self._named) < MOST_NAMED:
            self._named.append({"object": key.name, "bytes": nbytes, "state": state, "reason": reason})

    def as_json(self) -> dict[str, Any]:
        """{objects: {state: n}, bytes: {state: n}, named: [{object, bytes, state, reason}]}."""
        return {"objects": dict(self._objects), "bytes": dict(self._bytes), "named": self._named}

    def show(self, what: str, *, dry_run: bool) -> None:
        """The summary, unless the result is JSON."""
        if not self._as_json:
            self._progress.say(f"{what}: {'dry run, nothing is changed: ' if dry_run else ''}{self}")

    def __str__(self) -> str:
        parts = [f"{n:,} {state} ({format_size(self._bytes[state])})" for state, n in self._objects.items() if n]
        return ", ".join(parts) or "no objects"
