"""Objects in a bucket, moved by NIXL's OBJ backend.

NIXL puts and gets bytes of a length that it is told, and says neither how long an object is nor how much of it came. So
each is stored with its length in front and a mark at both ends, and one request gets it whole, of one version. It goes
through memory of our own: NIXL writes an object in one piece, while a frame's header and payload lie apart, and two
ranged reads take 1.2 to 2.3 times as long as one (against JuiceFS), and the copy next to nothing.

    magic (8) | length (8, little-endian) | mark (16, random) | the object | mark (16)
"""

import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvcore.api import (
    MISSING,
    STORED,
    Context,
    Entry,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    ObjectKey,
    StorageError,
    StoreOutcome,
)
from kvcore_nixl.agent import BACKENDS, Job, Piece
from kvcore_nixl.bucket import Bucket
from kvcore_nixl.config import NixlConfig
from kvcore_nixl.lanes import Lane, Lanes, address
from kvcore_nixl.memory import Buffers

MAGIC = b"KVNIXL1\n"
SUFFIX = ".kvnixl1"
"""What the keys end with: another plugin's frames below the same prefix are not taken for ours, nor ours for its."""
HEAD = struct.Struct("<8sQ16s")
MARK_BYTES = 16
ENVELOPE_BYTES = HEAD.size + MARK_BYTES
_AGAIN = 3
"""So often an object that is there but cannot be read is asked for again: while one is replaced, JuiceFS answers with
the length of one version and the bytes of the other."""
_UNREADABLE = "unreadable"


class Objects:
    """The object side of the storage."""

    def __init__(self, config: NixlConfig, context: Context) -> None:
        self._config = config
        self._prefix = config.prefix
        self._log = context.log
        self._numbers = itertools.count(1)
        self._bucket: Any = None
        self._lanes: Lanes | None = None

    def open(self) -> None:
        self._bucket = Bucket(self._config)
        self._bucket.check()
        self._lanes = Lanes(BACKENDS["obj"], self._bucket.nixl_params(), self._log)
        self._lanes.open()
        with self._lanes.lane() as lane:  # NIXL's way there is another than boto3's
            lane.agent.find([f"{self._prefix}is-anyone-there"])

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def register_memory(self, memory: memoryview) -> None:
        pass  # everything goes through the lanes' own memory

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        if not keys:
            return []
        with self._opened().lane() as lane:
            return lane.agent.find([self._name(key) for key in keys])

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        """A batch that fits into one lane."""
        outcomes = self._load(items)
        for _ in range(_AGAIN):
            broken = [i for i, o in enumerate(outcomes) if isinstance(o, Failed) and o.kind in ("corrupt", _UNREADABLE)]
            if not broken:
                break
            for i, outcome in zip(broken, self._load([items[i] for i in broken]), strict=True):
                outcomes[i] = outcome
        return [Failed(o.reason) if isinstance(o, Failed) and o.kind == _UNREADABLE else o for o in outcomes]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        """A batch that fits into one lane."""
        with self._opened().lane() as lane:
            memory = self._cut(lane.stage(sum(i.nbytes + ENVELOPE_BYTES for i in items)), items)
            for item, place in zip(items, memory, strict=True):
                _seal(item, place)
            errors = lane.agent.move("WRITE", [self._job(i.key, m) for i, m in zip(items, memory, strict=True)])
            return [Failed(self._text(error)) if error else STORED for error in errors]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._opened()
        self._bucket.delete([self._name(key) for key in keys])

    def entries(self) -> Iterator[Entry]:
        self._opened()
        for name, nbytes, stored_s in self._bucket.entries(self._prefix):
            key = self._key(name)
            if key is not None and nbytes >= ENVELOPE_BYTES:
                yield Entry(key, nbytes - ENVELOPE_BYTES, stored_s)

    def usage(self) -> None:
        return None  # a bucket is counted by listing it

    def ping(self) -> None:
        self._opened()
        self._bucket.check()

    def _load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        with self._opened().lane() as lane:
            memory = self._cut(lane.stage(sum(i.nbytes + ENVELOPE_BYTES for i in items)), items)
            for place in memory:
                place[: HEAD.size] = 0  # what an earlier call has left there must not be taken for an answer
            errors = lane.agent.move("READ", [self._job(i.key, m) for i, m in zip(items, memory, strict=True)])
            failed = [item.key for item, error in zip(items, errors, strict=True) if error]
            there = dict(zip(failed, self._find(failed, lane), strict=True))
            return [
                self._failed(there[item.key], error) if error else _open_envelope(item, place)
                for item, place, error in zip(items, memory, errors, strict=True)
            ]

    def _opened(self) -> Lanes:
        if self._lanes is None:
            raise StorageError("the storage is not open")
        return self._lanes

    def _job(self, key: ObjectKey, memory: Any) -> Job:
        return Job(next(self._numbers), self._name(key), [Piece(address(memory), len(memory), 0)])

    @staticmethod
    def _cut(memory: Any, items: Sequence[Item]) -> list[Any]:
        """The part of each item."""
        ends = list(itertools.accumulate(i.nbytes + ENVELOPE_BYTES for i in items))
        return [memory[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _find(self, keys: Sequence[ObjectKey], lane: Lane) -> list[bool | None]:
        """Whether each object is there; None: not to be had. NIXL calls a missing one an error like any other."""
        try:
            return [*lane.agent.find([self._name(key) for key in keys])] if keys else []
        except StorageError:
            return [None] * len(keys)

    def _failed(self, there: bool | None, error: str) -> LoadOutcome:
        if there is None:  # nobody answers
            return Failed(self._text(error))
        return Failed(self._text(error), _UNREADABLE) if there else MISSING

    def _text(self, error: str) -> str:
        return f"bucket {self._config.bucket!r}: {error}; NIXL's lines on stderr say why"

    def _name(self, key: ObjectKey) -> str:
        return f"{self._prefix}{key.name}{SUFFIX}"

    def _key(self, name: str) -> ObjectKey | None:
        try:
            return (
                ObjectKey.from_name(name[len(self._prefix) :].removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
            )
        except ValueError:
            return None


def _seal(item: Item, memory: Any) -> None:
    """Fill `memory` with the object and what goes around it."""
    mark = os.urandom(MARK_BYTES)
    memory[: HEAD.size] = np.frombuffer(HEAD.pack(MAGIC, item.nbytes, mark), np.uint8)
    Buffers(item.buffers).copy_to(memory[HEAD.size : -MARK_BYTES], 0)
    memory[-MARK_BYTES:] = np.frombuffer(mark, np.uint8)


def _open_envelope(item: Item, memory: Any) -> LoadOutcome:
    """Take the object out of `memory`, if it is whole."""
    magic, nbytes, mark = HEAD.unpack(bytes(memory[: HEAD.size]))
    if magic != MAGIC:
        return Failed("the object does not begin as this storage writes it", "corrupt")
    if nbytes > item.nbytes:
        return Failed(f"an object of {nbytes} bytes, room for {item.nbytes}", "too_large")
    end = HEAD.size + nbytes
    if bytes(memory[end : end + MARK_BYTES]) != mark:
        return Failed("the object's end is missing", "corrupt")
    Buffers(item.buffers).copy_from(memory[HEAD.size : end], 0)
    return Loaded(nbytes)
