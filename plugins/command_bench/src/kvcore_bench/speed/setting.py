"""What all groups of rows are given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore_bench.speed.peer import Peer


@dataclass(frozen=True)
class Setting:
    """One run.

    Args:
        quick: fewer rounds, fewer bytes.
        path: an existing directory that disk rows may write into.
        say: tells the user something, on stderr.
        peer_python, peer_scripts: where the peer is; None without one.
    """

    quick: bool
    path: Path
    say: Callable[[str], None]
    peer_python: str | None = None
    peer_scripts: Path | None = None

    @property
    def rounds(self) -> int:
        """Rounds for short things."""
        return 9 if self.quick else 25

    def peer_name(self) -> str | None:
        """Name and version of the peer, as its scripts tell it."""
        with self.peer("keys", chunks=1, chunk_tokens=16, tokens=[0] * 16) as peer:
            return peer.name or None

    def peer(self, group: str, **setting: Any) -> "Peer | NoPeer":
        """The peer's script of `group`, running; or one that has no rows."""
        if self.peer_python is None or self.peer_scripts is None:
            return NoPeer()
        script = self.peer_scripts / f"{group}.py"
        if not script.is_file():
            return NoPeer()
        return Peer(self.peer_python, script, {"quick": self.quick, **setting}, self.say)


class NoPeer:
    """Stands where no peer is."""

    name = ""

    def sampler(self, row: str) -> Callable[[], float | None] | None:
        """It has no row."""
        return None

    def __enter__(self) -> "NoPeer":
        return self

    def __exit__(self, *error: object) -> None:
        pass
