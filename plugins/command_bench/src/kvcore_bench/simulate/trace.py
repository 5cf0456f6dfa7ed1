"""Traces: requests as the blocks of their prompts, read from JSON lines.

A block of a `Trace` is a node of the tree of all prompts: the same tokens after other tokens are another block. Public
traces name blocks in two ways, by the whole prefix (Mooncake) or by the block's own tokens (Bailian). Read as paths
from the root, both mean the same, and no block can be hit that a prefix cache could not serve.
"""

import gzip
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from io import BufferedReader
from math import isfinite, log2
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from kvcore.api.errors import KVCoreError
from kvcore.cli.kit.arguments import standard_input
from kvcore.cli.kit.progress import Progress

MAX_LINE_BYTES = 64 << 20
_GZIP = b"\x1f\x8b"
_EXAMPLE = '{"timestamp": 3052, "input_length": 1100, "output_length": 90, "hash_ids": [0, 28, 29]}'
_PROGRESS_EVERY = 1000


class TraceError(KVCoreError):
    """A trace cannot be read. The text names the file and the line, and says what is expected."""


class Trace(msgspec.Struct):
    """Requests in order. Request `i` has the blocks `blocks[ends[i - 1]:ends[i]]`, from the head of its prompt on."""

    name: str
    format: str
    block_tokens: int
    times_s: "array[float]"
    ends: "array[int]"
    blocks: "array[int]"
    distinct: int = 0
    """How many different blocks there are; each of `blocks` is less."""
    input_tokens: int = 0
    unlike: int = 0
    """Requests with more or fewer blocks than their length makes at `block_tokens`."""
    likely_block_tokens: int = 0
    """The power of two that the lengths and blocks suggest."""
    token_bytes: int | None = None
    """KV of a token, where the trace says it."""

    def requests(self) -> Iterator[tuple[float, "array[int]"]]:
        """The time in seconds and the blocks of each request."""
        start = 0
        for time_s, end in zip(self.times_s, self.ends, strict=True):
            yield time_s, self.blocks[start:end]
            start = end


class Line(msgspec.Struct):
    """What is read of a line. `chat_id` only tells the formats apart, `block_tokens` and `token_bytes` are those of
    the first line."""

    input_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int | str]
    timestamp: float | None = None
    chat_id: Any = None
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    token_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Format(NamedTuple):
    """One kind of trace: how its first line is recognised, tokens per block where it does not say so, seconds per unit
    of its timestamps."""

    name: str
    recognise: Callable[[Line], bool]
    block_tokens: int
    time_s: float


FORMATS = (
    Format("kvcore", lambda line: line.block_tokens is not None, 0, 1e-3),
    Format("Bailian", lambda line: line.chat_id is not None, 16, 1.0),
    Format("Mooncake", lambda line: True, 512, 1e-3),
)
"""In the order in which they are tried."""


def read_trace(path: str, *, block_tokens: int | None = None, limit: int | None = None) -> Trace:
    """Read a file, gzipped or not; `-` is standard input.

    Memory does not grow with the file but with what is kept: 4 bytes for each block of each request, and about 200 for
    each different block while reading. `limit` reads only so many requests from the front.

    Raises `TraceError` at the first line that is not a request, and `OSError`.
    """
    name = "standard input" if path == "-" else os.path.basename(path)
    with nullcontext(standard_input().buffer) if path == "-" else open(path, "rb") as file:
        return _Reading(name, block_tokens).read(cast(BufferedReader, file), limit)


class _Reading:
    """The state of reading one trace."""

    def __init__(self, name: str, block_tokens: int | None) -> None:
        self._name = name
        self._block_tokens = block_tokens
        self._nodes: dict[tuple[int, int | str], int] = {}
        self._named = 0
        self._decode = msgspec.json.Decoder(Line).decode

    def read(self, file: BufferedReader, limit: int | None) -> Trace:
        trace = None
        with Progress(f"reading {self._name}", limit, "requests") as progress:
            for number, text in self._lines(file):
                line = self._line(number, text)
                if trace is None:
                    trace, time_s = self._begin(line)
                self._add(trace, line, time_s)
                done = len(trace.ends)
                if done % _PROGRESS_EVERY == 0:
                    progress.add(_PROGRESS_EVERY)
                if done == limit:
                    break
        if trace is None:
            raise TraceError(f"{self._name} holds no request: expected one JSON object a line, such as {_EXAMPLE}")
        if not trace.blocks:
            raise TraceError(
                f"{self._name}: no prompt is as long as one block of {trace.block_tokens} tokens, so nothing can be "
                "cached: if its blocks are smaller, say so with --block-tokens"
            )
        trace.distinct = len(self._nodes)
        trace.likely_block_tokens = 2 ** round(log2(max(1, trace.input_tokens / max(1, self._named))))
        return trace

    def _lines(self, file: BufferedReader) -> Iterator[tuple[int, bytes]]:
        number = 0
        packed = file.peek(2)[:2] == _GZIP
        with closing(gzip.GzipFile(fileobj=file)) if packed else nullcontext(file) as source:
            try:
                while text := source.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(text) > MAX_LINE_BYTES:
                        raise self._wrong(number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
                    if not text.isspace():
                        yield number, text
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise TraceError(f"{self._name} is damaged after line {number}: {error}") from error

    def _line(self, number: int, text: bytes) -> Line:
        try:
            line = self._decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is one
            raise self._wrong(number, str(error)) from None
        if line.timestamp is not None and not isfinite(line.timestamp):
            raise self._wrong(number, f"timestamp is {line.timestamp}")
        return line

    def _wrong(self, number: int, what: str) -> TraceError:
        return TraceError(
            f"{self._name}, line {number}: {what}; expected one JSON object a line with input_length (tokens of the "
            f"prompt) and hash_ids (its blocks, from the first on), such as {_EXAMPLE}"
        )

    def _begin(self, line: Line) -> tuple[Trace, float]:
        form = next(f for f in FORMATS if f.recognise(line))
        tokens = self._block_tokens or line.block_tokens or form.block_tokens
        trace = Trace(self._name, form.name, tokens, array("d"), array("q"), array("I"))
        trace.token_bytes = line.token_bytes
        return trace, form.time_s

    def _add(self, trace: Trace, line: Line, time_s: float) -> None:
        ids, length, size = line.hash_ids, line.input_length, trace.block_tokens
        whole = length // size
        self._named += len(ids)
        trace.unlike += len(ids) not in (whole, -(-length // size))
        nodes, parent, add = self._nodes, -1, trace.blocks.append
        for block_id in ids[:whole]:  # the last may be a part of a block, which is not cached
            parent = nodes.setdefault((parent, block_id), len(nodes))
            add(parent)
        last = trace.times_s[-1] if trace.times_s else 0.0
        trace.times_s.append(last if line.timestamp is None else max(last, line.timestamp * time_s))
        trace.ends.append(len(trace.blocks))
        trace.input_tokens += length
