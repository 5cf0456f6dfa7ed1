"""What an engine plugin offers to the command line: its identity, its checks, and how its engine is started."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kvcore.api.errors import PluginError
from kvcore.api.keys import KeySource


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kvcore doctor`. `remedy` is the next step when `level` is not `ok`."""

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What `kvcore run` was asked for.

    Args:
        words: what the user wrote for the engine, behind `--`.
        via: one of the integration's `ways`.
        role: `both`; or `prefill` and `decode`, for engines that compute prompts for others, or decode what others
            computed.
        config: absolute path of kvcore's file; None: the defaults are in force.
        values: laid over the file, by path: `{"l1.size": "8GiB"}`.
        l1_bytes: what `l1.size` comes to on this machine.
    """

    words: tuple[str, ...]
    via: str
    role: Literal["both", "prefill", "decode"] = "both"
    config: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    l1_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine with kvcore.

    Args:
        command: the whole command line, the program first.
        added: the words of it that the user has not written.
        env: variables to set beside those of now.
        untested: a sentence, when kvcore was not tested with the engine's version: `kvcore run` then refuses.
    """

    command: tuple[str, ...]
    added: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    untested: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that somebody asks about, and that the engine has not sent.

    Args:
        tokens: its token ids.
        block_tokens, chunk_tokens: of the model's space.
        extra: `ModelSpec.extra` of it, as the connector has registered the model.
        adapter: the LoRA adapter, as `NAME=PATH`; empty: none.
        salt: what separates its KV from others', as the engine's users give it; empty: nothing.
    """

    tokens: Sequence[int]
    block_tokens: int
    chunk_tokens: int
    extra: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""
    salt: str = ""


class EngineIntegration(ABC):
    """Describes one engine connector. The engine loads the connector itself; this is for people."""

    ways: ClassVar[tuple[str, ...]] = ()
    """Names of the ways in which the engine can use kvcore, the usual one first. Empty: `launch` is not offered."""

    schemes: ClassVar[tuple[str, ...]] = ()
    """Key schemes of its own, by which one block is an object: the block hashes of `key_source` are the names, and no
    key generator is asked. They tell salts and adapters apart, whose requests share a namespace. By other schemes a
    salt is a tenant, and an adapter another model."""

    def __init__(self, config: Any, context: Any) -> None:
        """`config` is the validated model of the plugin's own config; `context` is a `Context`."""

    @abstractmethod
    def check(self) -> list[Finding]:
        """Is the engine installed, is its version known to work, is the connector registered? Must not raise."""

    @abstractmethod
    def usage(self) -> str:
        """The command line that runs the engine with this connector, for people to copy."""

    def launch(self, request: LaunchRequest) -> Launch:
        """The command that starts the engine, in this environment, with what the user wrote and what kvcore needs.

        What the user has written is kept. Raises `ConfigError` when it cannot be kept, `PluginError` when the engine
        is not here. Imports no engine.
        """
        raise PluginError(f"kvcore run cannot start this engine. Start it so: {self.usage()}")

    def key_source(self, prompt: Prompt) -> KeySource:
        """What the engine would give a key generator for this prompt, for `kvcore explain --prompt`. The default has
        its tokens and no block hashes.

        Raises `ConfigError` where that cannot be told, as for an adapter without its path. Imports no engine.
        """
        return KeySource(prompt.chunk_tokens, prompt.block_tokens, prompt.tokens)
