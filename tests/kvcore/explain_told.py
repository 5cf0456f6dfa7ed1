"""A real cache, and requests to it as an engine makes them, for tests of what is said of these."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvcore.engine import Asked, CacheEngine, Space
from kvcore.explain.explain import explain_request
from kvcore.explain.models import Explanation
from kvcore.explain.tell import explanation
from kvcore.testing import chunks

SIZE = 32
"""Tokens of a chunk."""
MEMORY = "l2: [{name: near, storage: memory}]\n"


class Told:
    """One cache, and requests to it as an engine makes them."""

    def __init__(self, engine: CacheEngine) -> None:
        self.engine = engine
        self.space = engine.register(chunks.spec())

    def ask(
        self, request: str, hashes: Sequence[bytes], tokens: "Sequence[int] | None" = None, **more: Any
    ) -> Explanation:
        """Look up, take what is found, and explain."""
        space = more.pop("space", self.space)
        count = len(tokens) if tokens is not None else len(hashes) * SIZE
        lookup = self.engine.lookup(space, tuple(hashes), more.pop("first", 0), Asked(request, count, tokens, **more))
        assert lookup.wait(30)
        if (lookup.poll() or 0) > lookup.first:
            self.engine.retrieve(lookup, 0, [list(range(1000))])
        self.engine.release(lookup)
        return self.explain(request)

    def explain(self, request: str) -> Explanation:
        return explain_request(self.engine, request).explanations[0]

    def put(self, hashes: Sequence[bytes], space: "Space | None" = None) -> None:
        chunks.put(self.engine, space or self.space, hashes)


@contextmanager
def opening(folder: Path) -> Iterator[Callable[..., Told]]:
    """Opens caches, which are closed at the end."""
    with ExitStack() as stack:

        def open_(text: str = "l2: []\n", tokens: bool = False) -> Told:
            path = folder / "kvcore.yaml"
            record = f"inspect: {{tokens: {str(tokens).lower()}}}\n"
            path.write_text(f"l1: {{size: 8MiB}}\nmin_object_size: 128KiB\nlookup_timeout: 20s\n{record}{text}")
            engine = CacheEngine.open(str(path))
            stack.callback(engine.close)
            return Told(engine)

        yield open_


def missed(said: Explanation, reason: str, *words: str, chunk: int = 0) -> None:
    """It ended at this chunk for this reason, with these words in what is said of it."""
    assert said.broke is not None
    assert (said.broke.reason, said.broke.chunk) == (reason, chunk), said.broke
    for word in words:
        assert word in f"{said.broke.text} | {said.broke.remedy}", said.broke
    assert len(explanation(said)) <= 8
