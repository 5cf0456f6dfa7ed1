"""What an author gives to the storage suite, and the helpers its tests share."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvcore.api import Failed, Loaded, Missing, ObjectKey, Stored
from kvcore.testing.driver import AnyStorage, Driver
from kvcore.testing.memory import Room, source


class StorageSuite:
    """The part of the suite that an author overrides."""

    forgets: ClassVar[bool] = False
    """True: the storage may drop objects at will (memcached does), so that `Missing` is always allowed."""
    several_instances: ClassVar[bool] = False
    """True: several instances, also of several processes, may use one place at once. Implied by `shared`."""
    crashable: ClassVar[bool] = True
    """False: the crash test cannot run, because `make_storage` needs something that a child process does not have."""

    def make_storage(self, tmp_path: Path) -> AnyStorage:
        """A fresh, unopened storage over the place that `tmp_path` names, with room for 64 MiB.

        The place is empty at first. Called again with the same `tmp_path`, it must be the same place: this is how
        a restart is tested. A server's storage uses `str(tmp_path)` in its key prefix.
        """
        raise NotImplementedError("override make_storage(self, tmp_path) and return an unopened storage")

    def make_bounded(self, tmp_path: Path, capacity_bytes: int) -> AnyStorage | None:
        """The same with a capacity of its own of `capacity_bytes`, or None when it has no such option.

        An option of type `Size` takes the number as it is: `AcmeConfig(capacity=capacity_bytes)`.
        """
        return None

    def raw_read(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> bytes:
        """Optional: the bytes of the object as the store really holds them, had past `storage`."""
        raise NotImplementedError

    def raw_write(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey, data: bytes) -> None:
        """Optional: put an object past `storage`, which is closed at that moment when it is persistent."""
        raise NotImplementedError

    def raw_corrupt(self, storage: AnyStorage, tmp_path: Path, key: ObjectKey) -> None:
        """Optional: damage the object past `storage` (cut it short, say); closed as for `raw_write`."""
        raise NotImplementedError

    def raw_bytes(self, storage: AnyStorage, tmp_path: Path) -> int:
        """Optional: how many bytes the store really holds at this moment, unfinished writes included."""
        raise NotImplementedError

    # For the tests.

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[Driver]:
        """The open storage."""
        with Driver(self.make_storage(tmp_path)) as driver:
            yield driver

    def overrides(self, name: str) -> bool:
        """Whether the author gave the optional method `name`."""
        return getattr(type(self), name) is not getattr(StorageSuite, name)

    def need(self, name: str) -> None:
        """Skip the test when the optional method `name` was not given."""
        if not self.overrides(name):
            does_not_apply(f"no `{name}` was given to the suite")

    def put(
        self, driver: Driver, key: ObjectKey, data: bytes, at: Sequence[int] = (), *, offset: int = 0, what: str = ""
    ) -> None:
        """Store one object, which must succeed."""
        (outcome,) = driver.store([source(key, data, at, offset=offset)])
        assert isinstance(outcome, Stored), f"an object of {len(data)} bytes was not stored{what}: {outcome}"

    def get(self, driver: Driver, key: ObjectKey, room_bytes: int) -> bytes | None:
        """Load one object into a room of `room_bytes`; None when it is missing."""
        room = Room(room_bytes)
        (outcome,) = driver.load([room.item(key)])
        assert not isinstance(outcome, Failed), f"an object that was stored failed to load: {outcome}"
        if isinstance(outcome, Missing):
            assert room.clean_from(room_bytes), "bytes outside the caller's buffers changed"
            return None
        assert room.clean_from(outcome.nbytes), f"`load` answered {outcome} but wrote beyond that many bytes"
        return bytes(room.view[: outcome.nbytes])

    def expect(self, driver: Driver, key: ObjectKey, *allowed: bytes, what: str) -> bytes | None:
        """Load one object, which must be one of `allowed`, whole."""
        got = self.get(driver, key, max(len(data) for data in allowed) + 64)
        self.judge(got, allowed, what)
        return got

    def judge(self, got: bytes | None, allowed: Sequence[bytes | None], what: str) -> None:
        """`got` must be one of `allowed` (None: missing, which a storage that `forgets` may always answer)."""
        if got in allowed or (got is None and self.forgets):
            return
        assert got is not None, f"{what}: the object is missing"
        sizes = sorted({len(data) for data in allowed if data is not None})
        raise AssertionError(f"{what}: {describe(got, allowed)} ({len(got)} bytes, allowed sizes {sizes})")


def loaded(room: Room, outcome: object) -> bytes | None:
    """What a `load` of one item gave: bytes, or None when there was no object."""
    return bytes(room.view[: outcome.nbytes]) if isinstance(outcome, Loaded) else None


def describe(got: bytes, allowed: Sequence[bytes | None]) -> str:
    """In words, how `got` differs from everything allowed."""
    wholes = [data for data in allowed if data is not None]
    if any(data.startswith(got) for data in wholes):
        return "only the front of an object came back (a torn write, or a wrong length)"
    if any(got.startswith(data) for data in wholes) and len(got) not in map(len, wholes):
        return "more bytes came back than were stored"
    if got[:16] in {data[:16] for data in wholes}:
        return "a mix of several objects or versions came back (a torn write)"
    return "bytes came back that were never stored under this key"


def does_not_apply(reason: str) -> None:
    """End the test with the reason why it has nothing to say about this storage."""
    pytest.skip(f"does not apply: {reason}")
