"""What an engine plugin offers to the command line: its identity and its checks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kvcore doctor`. `remedy` is the next step when `level` is not `ok`."""

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class EngineIntegration(ABC):
    """Describes one engine connector. The engine loads the connector itself; this is for people."""

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    @abstractmethod
    def check(self) -> list[Finding]:
        """Is the engine installed, is its version known to work, is the connector registered? Must not raise."""

    @abstractmethod
    def usage(self) -> str:
        """The command line that runs the engine with this connector, for people to copy."""
