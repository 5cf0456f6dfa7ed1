"""What the page is shown of: `kvcore serve`, two engines with tenants, a tier that is down, and requests that have much
in common."""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvcore.engine import Asked, Engine, GroupSpec, ModelSpec, Space
from kvcore.service import open_engine
from kvcore.testing.servers import free_port
from kvcore.testing.servers.kvcore import KVCoreServer

TOKEN = "correct horse battery"
TIMEOUT_S = 60.0
LAYERS = GroupSpec(("model.layers.0", "model.layers.1"), (8 << 10, 8 << 10))


class Scene:
    """A server that has been used.

    Attributes:
        url: of its page's server. requests: the ids of what was asked, by what they are an example of.
    """

    def __init__(self, folder: Path, stack: ExitStack, **more: Any) -> None:
        self.requests: dict[str, str] = {}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        cold = {"plugin": "faulty", "storage": "memory", "error_rate": 1.0}
        config: dict[str, Any] = {
            "server": {"url": f"unix://{folder}/kvcore.sock", "http": {"listen": f"127.0.0.1:{port}", "token": TOKEN}},
            "l1": {"size": "24MiB"},
            "chunk_tokens": 128,
            "lookup_timeout": "20s",
            "l2": [
                {"name": "disk", "storage": {"plugin": "disk", "path": str(folder / "disk"), "capacity": "1GiB"}},
                {"name": "cold", "storage": cold, "write": "evicted"},
            ],
            "tenants": {"alice": {"l1": "12MiB"}, "bob": {"l1": "8MiB"}, "default": {"l1": "4MiB"}},
            **more,
        }
        self.server = KVCoreServer(folder, config)
        stack.enter_context(self.server)
        self.chat = self._engine(stack, "vllm-chat")
        self.batch = self._engine(stack, "vllm-batch")
        self.alice = register(self.chat, "Qwen/Qwen3-8B", "alice")
        self.bob = register(self.batch, "Qwen/Qwen3-8B", "bob")

    def _engine(self, stack: ExitStack, name: str) -> Engine:
        engine = open_engine(str(self.server.config), flags={"server.timeout": "20s"}, name=name)
        stack.callback(engine.close)
        return engine

    def play(self) -> None:
        """Some conversations, batches of questions about documents, and requests that miss for one reason each."""
        for turn in range(4):
            for talk in ("weather", "recipes", "law"):
                words = ["system"] * 6 + [talk] * (4 + 5 * turn)
                self.requests["hit"] = self.ask(self.chat, self.alice, words, f"{talk}-{turn}")
        for document in range(5):
            for question in range(3):
                words = ["handbook"] * 10 + [f"document {document}"] * 12 + [f"question {question}"] * 2
                self.ask(self.batch, self.bob, words, f"batch-{document}-{question}")
        self.requests["never"] = self.ask(self.batch, self.bob, ["never asked before"] * 9, "fresh")
        self.requests["part"] = self.ask(self.chat, self.alice, ["system"] * 6 + ["law"] * 12 + ["other"] * 9, "part")
        self.requests["odd"] = self.ask(self.batch, self.bob, ["handbook"] * 10, "<img src=x onerror=alert(1)> & co/ü")

    def ask(self, engine: Engine, space: Space, words: Sequence[str], name: str) -> str:
        """A request whose chunks have this content, one word each; its id."""
        name = f"chatcmpl-{hashlib.sha256(name.encode()).hexdigest()[:6]}-{name}"
        keys = hashes(words)
        lookup = engine.lookup(space, keys, 0, Asked(name, len(keys) * 128 + 37))
        give_up = time.monotonic() + TIMEOUT_S
        while (found := lookup.poll()) is None:
            assert time.monotonic() < give_up, "a lookup was not answered"
            time.sleep(0.002)
        ids = [list(range(len(keys) * space.chunk_blocks))]
        if found:
            engine.retrieve(lookup, 0, ids)
        engine.release(lookup)
        if found < len(keys):
            plan = engine.reserve(space, keys, found, len(keys), ids, request=name)
            engine.publish(plan.id)
        return name


def register(engine: Engine, model: str, tenant: str) -> Space:
    """A space of a model that the server knows."""
    spec = ModelSpec("vllm", model, "w", "bfloat16", 2, "LBHNC", "CPU", "avx512", 16, 1, (LAYERS,))
    space = engine.register(spec, tenant)
    give_up = time.monotonic() + TIMEOUT_S
    while engine.descriptor() is None:
        assert time.monotonic() < give_up, "the server was not connected"
        time.sleep(0.01)
    engine.clear(space)  # its answer comes behind that to the registration
    return space


def hashes(words: Sequence[str]) -> list[bytes]:
    """Of chunks with this content: each stands for all before it, too."""
    found, before = [], b""
    for i, word in enumerate(words):
        before = hashlib.sha256(before + f"{i} {word}".encode()).digest()
        found.append(before)
    return found


@contextmanager
def scene(folder: Path, **more: Any) -> Iterator[Scene]:
    """It runs until the end of the block. `more`: further values of the configuration."""
    with ExitStack() as stack:
        yield Scene(folder, stack, **more)


def chromium() -> str:
    """Debian's browser. Raises where there is none."""
    path = os.environ.get("KVCORE_TEST_CHROMIUM", "/usr/bin/chromium")
    if not os.access(path, os.X_OK):
        raise RuntimeError(f"{path} is missing: apt-get install chromium, or set KVCORE_TEST_CHROMIUM to a Chromium")
    return path
