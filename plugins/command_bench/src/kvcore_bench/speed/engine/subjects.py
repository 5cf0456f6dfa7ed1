"""The servers that are measured: those that run already, and vLLM started for it, alone or with a cache behind it."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvcore.api.errors import ConfigError, KVCoreError
from kvcore.config import load_config
from kvcore.plugins import registry_from_env
from kvcore.testing.servers import Server, ServerError, free_port
from kvcore_bench.speed.engine.client import Api

MODEL = "model"
"""What a server that we start calls its model."""
_LMCACHE_ENV = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
"""LMCache's keys are the same in two processes only with the first; nothing of a benchmark is told to its makers."""


class EngineError(KVCoreError):
    """A server does not come up."""


class Subject(NamedTuple):
    """A server to measure. `up`: while the context lasts it runs, and is reached at the address that it gives.
    `command`: how to start it by hand; empty for one that runs already."""

    name: str
    up: Callable[[], AbstractContextManager[str]]
    command: str = ""


def given(words: Sequence[str]) -> list[Subject]:
    """Of `URL` or `NAME=URL`. Raises `ConfigError` for a name that is given twice."""
    found = []
    for word in words:
        name, equals, url = word.partition("=")
        name, url = (name, url) if equals and "/" not in name else (word, word)
        Api(url)  # raises for what is no address
        found.append(Subject(name, lambda url=url: _there(url)))  # type: ignore[misc]
    return _different(found)


@dataclass(frozen=True)
class Vllm:
    """vLLM, to be started in several ways.

    Args:
        model: a directory or a name. words: of `vllm serve`, behind the model.
        memory_bytes: host memory of the cache behind it, whichever it is.
        config, values: kvcore's file and what is laid over it.
        lmcache: LMCache's command, and more words of its server.
        logs: an existing directory. ready_s: how long a server may take to come up.
        say: tells the user something. check: raises when the user wants an end.
    """

    model: str
    words: Sequence[str]
    memory_bytes: int
    logs: Path
    ready_s: float
    say: Callable[[str], None]
    check: Callable[[], None]
    config: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    lmcache: Sequence[str] = ("lmcache",)

    def ways(self, names: Sequence[str]) -> list[Subject]:
        """Of `plain`, `kvcore`, `offloading`, `lmcache`, and `NAME=WORDS` for vLLM with more words. Raises
        `ConfigError`, also for what kvcore would refuse: later it would have cost the start of those before."""
        return _different([self._way(name) for name in names])

    def _way(self, word: str) -> Subject:
        name, equals, more = word.partition("=")
        if equals:
            try:
                return self._vllm(name, shlex.split(more))
            except ValueError as error:
                raise ConfigError(f"--with {word}: {error}") from None
        known: dict[str, Callable[[], Subject]] = {
            "plain": lambda: self._vllm("plain", []),
            "kvcore": self._kvcore,
            "offloading": lambda: self._vllm(
                "offloading", ["--kv-offloading-size", f"{self.memory_bytes / (1 << 30):g}"]
            ),
            "lmcache": self._lmcache,
        }
        if name not in known:
            raise ConfigError(f"--with {name}: write one of {', '.join(known)}, or NAME='MORE WORDS OF VLLM'")
        return known[name]()

    def _vllm(self, name: str, more: Sequence[str]) -> Subject:
        # The module, not the script: the wheel for CPUs has a script that fails.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model()]
        return self._subject(name, [*command, *self.words, *more])

    def _kvcore(self) -> Subject:
        memory = {"l1.size": f"{self.memory_bytes}B"}
        if self.config is None and not any(path.startswith("l2") for path in self.values):
            memory["l2"] = "[]"  # what is asked here is of no use to anyone later: nothing for the default tier
        values = {**memory, **self.values}
        load_config(self.config, flags=values, registry=registry_from_env())
        command = [sys.executable, "-m", "kvcore", "run", "vllm"]
        command += ["--config", os.path.abspath(self.config)] if self.config else []
        command += [word for path, value in values.items() for word in ("--set", f"{path}={value}")]
        return self._subject("kvcore", [*command, "--", "serve", self._model(), *self.words])

    def _lmcache(self) -> Subject:
        port, http = free_port(), free_port()
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        engine = self._vllm("lmcache", ["--kv-transfer-config", json.dumps(transfer)])
        binary, *more = self.lmcache
        command = [
            binary, "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1",
            "--http-port", str(http), "--l1-size-gb", f"{self.memory_bytes / (1 << 30):g}", "--eviction-policy", "LRU",
            *more,
        ]  # fmt: skip

        @contextmanager
        def up() -> Iterator[str]:
            with (
                self._running("lmcache-server", command, f"http://127.0.0.1:{http}", "/healthcheck"),
                engine.up() as url,
            ):
                yield url

        return Subject("lmcache", up, f"{_line(command)} & {engine.command}")

    def _subject(self, name: str, words: Sequence[str]) -> Subject:
        fixed = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--enable-prompt-tokens-details"]

        @contextmanager
        def up() -> Iterator[str]:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            with self._running(name, [*words, *fixed, "--port", str(port)], url, "/health"):
                yield url

        return Subject(name, up, _line([*words, *fixed]))

    @contextmanager
    def _running(self, name: str, command: Sequence[str], url: str, path: str) -> Iterator[None]:
        api = Api(url)
        env = _LMCACHE_ENV if name.startswith("lmcache") else {}

        def ready() -> bool:
            self.check()
            return api.read(path, 5.0)[0] == 200

        server = Server(name, command, ready=ready, folder=self.logs, env={**env, **_paths(env)})
        self.say(f"{name}: starting (its log: {server.log})")
        with ExitStack() as undo:
            undo.callback(server.stop)
            try:
                server.start(self.ready_s)
            except ServerError as error:
                raise EngineError(str(error)) from None
            yield

    def _model(self) -> str:
        """A directory, as the server finds it from elsewhere."""
        return os.path.abspath(self.model) if os.path.isdir(self.model) else self.model


@contextmanager
def _there(url: str) -> Iterator[str]:
    yield url


def _different(subjects: list[Subject]) -> list[Subject]:
    names = [subject.name for subject in subjects]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two servers are called {again!r}: give each a name of its own, as NAME=...")
    return subjects


def _paths(env: Mapping[str, str]) -> dict[str, str]:
    """Where modules are found, as a process finds them that runs elsewhere."""
    paths = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))} if paths else {}


def _line(command: Sequence[str]) -> str:
    return shlex.join(command)
