"""One caller at a time: what goes in comes out, whole, in order, and nowhere else."""

import time
from pathlib import Path

import pytest

from kvcore.api import BlockingStorage, Failed, Item, Loaded, Missing, ObjectKey, Storage, Stored
from kvcore.testing.driver import Driver
from kvcore.testing.memory import NAMESPACE, Pieces, Room, aligned, content, make_key, source, split
from kvcore.testing.storage.base import StorageSuite, does_not_apply, loaded

SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 65_536, (1 << 20) + 3)
CUTS: dict[str, tuple[int, ...]] = {
    "one buffer": (),
    "page header": (4096,),
    "odd cuts": (1, 3, 517, 4099),
    "empty buffers": (0, 100, 100, 5000),
    "many buffers": tuple(range(37, 4000, 37)),
}
SCATTERED: dict[str, tuple[int, ...]] = {
    "few": (4096, 1, 70_001, 0, 4095, 3),
    "large": (4096, 300_003, 524_287, 5),
    "many": (4096, *(1237 + i for i in range(64))),
}
"""Sizes of a frame's header and of the ranges that its payload lies in."""


class RoundTripTests(StorageSuite):
    """Round trips, batches, keys and the caller's memory."""

    def test_traits_are_sane(self, tmp_path: Path) -> None:
        storage = self.make_storage(tmp_path)
        assert isinstance(storage, Storage | BlockingStorage), "make_storage must return a Storage or BlockingStorage"
        for flag in ("persistent", "shared", "zero_copy"):
            assert isinstance(getattr(storage, flag), bool), f"`{flag}` must be a bool"
        limit = storage.max_object_bytes
        assert limit is None or (isinstance(limit, int) and limit > 0), "`max_object_bytes` must be positive or None"
        concurrency = storage.preferred_concurrency
        assert isinstance(concurrency, int), "`preferred_concurrency` must be an int"
        assert concurrency >= 1, "`preferred_concurrency` must be at least 1"

    def test_ping_answers_when_open(self, driver: Driver) -> None:
        assert driver.call("ping") is None, "`ping` must return None when the store answers"

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_round_trip_at_odd_sizes(self, driver: Driver, nbytes: int) -> None:
        if driver.storage.max_object_bytes is not None and nbytes > driver.storage.max_object_bytes:
            does_not_apply(f"max_object_bytes is {driver.storage.max_object_bytes}")
        key, data = make_key(nbytes), content(nbytes, nbytes)
        self.put(driver, key, data)
        room = Room(nbytes)
        (outcome,) = driver.load([room.item(key)])
        self.judge(loaded(room, outcome), [data], f"an object of {nbytes} bytes in a room of its own size")
        assert room.clean_from(nbytes), "`load` wrote outside the caller's buffers"

    def test_empty_object(self, driver: Driver) -> None:
        """An object without bytes is kept or refused, and harms nobody."""
        empty, other = make_key("empty"), make_key("other")
        outcomes = driver.store([source(empty, b""), source(other, b"other")])
        assert outcomes[1] == Stored(), f"an object failed because an empty one was in its batch: {outcomes[1]}"
        if outcomes[0] == Stored():
            self.expect(driver, empty, b"", what="an empty object")
        self.expect(driver, other, b"other", what="the neighbour of an empty object")

    @pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
    @pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
    def test_several_buffers(self, driver: Driver, cuts: tuple[int, ...], offset: int) -> None:
        """An object is the concatenation of its buffers, cut at other places when it is loaded."""
        key, data = make_key("cut"), content("cut", 20_003)
        self.put(driver, key, data, cuts, offset=offset, what=f" from {len(cuts) + 1} buffers")
        for at in CUTS.values():
            room = Room(len(data), at, offset=offset)
            (outcome,) = driver.load([room.item(key)])
            self.judge(loaded(room, outcome), [data], f"stored from {len(cuts) + 1}, loaded into {len(at) + 1} buffers")
            assert room.clean_from(len(data)), "`load` wrote outside the caller's buffers"

    @pytest.mark.parametrize("sizes", SCATTERED.values(), ids=SCATTERED.keys())
    def test_scattered_buffers(self, driver: Driver, sizes: tuple[int, ...]) -> None:
        """The buffers of an object lie anywhere, as in an engine's own memory: of odd sizes, unaligned, apart. In a
        batch, each object is loaded into other places than it was stored from."""
        orders = [sizes, (sizes[0], *sizes[:0:-1]), (sizes[0], sum(sizes[1:])), sizes]
        keys = [make_key(("scattered", i)) for i in range(len(orders))]
        data = [content(key, sum(sizes)) for key in keys]
        sources = [Pieces(order) for order in orders]
        for pieces, each in zip(sources, data, strict=True):
            pieces.fill(each)
        items = [Item(k, [b.toreadonly() for b in p.buffers]) for k, p in zip(keys, sources, strict=True)]
        stored = driver.store(items)
        assert all(outcome == Stored() for outcome in stored), f"a store from scattered buffers failed: {stored}"
        rooms = [Pieces(order) for order in orders[::-1]]
        loads = driver.load([Item(key, room.buffers) for key, room in zip(keys, rooms, strict=True)])
        for i, (room, outcome) in enumerate(zip(rooms, loads, strict=True)):
            got = room.data if isinstance(outcome, Loaded) else None
            self.judge(got, [data[i]], f"from {len(orders[i])} scattered buffers into {len(room.buffers)} others")
            assert room.clean(), "`load` wrote outside the caller's buffers"

    @pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097, 100_001])
    @pytest.mark.parametrize("extra", [1, 4095, 4096, 70_000])
    def test_larger_room(self, driver: Driver, nbytes: int, extra: int) -> None:
        """An object fills its room from the front; the rest of the room stays as it was."""
        key, data = make_key("small"), content("small", nbytes)
        self.put(driver, key, data)
        for at in ((), (1, nbytes, nbytes + 1)):
            room = Room(nbytes + extra, at)
            (outcome,) = driver.load([room.item(key)])
            self.judge(loaded(room, outcome), [data], f"{nbytes} bytes in a room of {nbytes + extra}")
            if isinstance(outcome, Loaded):
                assert room.clean_from(nbytes), "`load` changed the room beyond the object's length"

    @pytest.mark.parametrize(
        ("nbytes", "room_bytes"), [(2, 1), (4097, 4096), (8192, 4096), (100_000, 99_999), (512, 0)]
    )
    def test_room_too_small(self, driver: Driver, nbytes: int, room_bytes: int) -> None:
        """An object longer than its room is `Failed`, never a cut one, and its neighbours in the batch load."""
        long, fit = make_key("long"), make_key("fit")
        self.put(driver, long, content("long", nbytes))
        self.put(driver, fit, content("fit", 5000))
        rooms = [Room(room_bytes), Room(5000)]
        outcomes = driver.load([rooms[0].item(long), rooms[1].item(fit)])
        allowed = (Failed, Missing) if self.forgets else Failed
        assert isinstance(outcomes[0], allowed), (
            f"an object of {nbytes} bytes in a room of {room_bytes} must be Failed, not {outcomes[0]}"
        )
        assert rooms[0].clean_from(room_bytes), "`load` wrote outside the caller's buffers when the room was too small"
        self.judge(loaded(rooms[1], outcomes[1]), [content("fit", 5000)], "the neighbour of one with too little room")
        self.expect(driver, long, content("long", nbytes), what="after a load that had too little room")

    def test_empty_batches(self, driver: Driver) -> None:
        assert driver.exists([]) == [], "`exists` of no key must return []"
        assert driver.load([]) == [], "`load` of no item must return []"
        assert driver.store([]) == [], "`store` of no item must return []"
        driver.delete([])

    def test_missing_keys_keep_the_order(self, driver: Driver) -> None:
        """Outcomes stand in the order of the batch, whatever is missing from it."""
        keys = [make_key(i) for i in range(24)]
        data = {key: content(i, 1000 + 777 * i) for i, key in enumerate(keys)}
        held = [key for i, key in enumerate(keys) if i % 3 != 1]
        assert all(o == Stored() for o in driver.store([source(k, data[k], (100,)) for k in held])), "a store failed"
        order = keys[::-1][5:] + keys[::-1][:5]
        expected = [key in held for key in order]
        answers = driver.exists(order)
        if not self.forgets:
            assert answers == expected, "`exists` of a mixed batch is wrong or out of order"
        rooms = [Room(len(data[key])) for key in order]
        outcomes = driver.load([room.item(key) for room, key in zip(rooms, order, strict=True)])
        for key, room, outcome in zip(order, rooms, outcomes, strict=True):
            what = f"item {order.index(key)} of a batch of {len(order)}"
            self.judge(loaded(room, outcome), [data[key] if key in held else None], what)
            if key not in held:
                assert isinstance(outcome, Missing), f"{what} was never stored and must be Missing, not {outcome}"

    def test_large_batch(self, driver: Driver) -> None:
        keys = [make_key(i) for i in range(300)]
        outcomes = driver.store([source(key, content(i, 500 + i)) for i, key in enumerate(keys)])
        assert all(outcome == Stored() for outcome in outcomes), "a store in a batch of 300 failed"
        rooms = [Room(1000) for _ in keys]
        loads = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        for i, (room, outcome) in enumerate(zip(rooms, loads, strict=True)):
            self.judge(loaded(room, outcome), [content(i, 500 + i)], f"item {i} of a batch of 300")

    def test_overwrite(self, driver: Driver) -> None:
        """After a second store the old or the new object is there, whole, without a tail of a longer one."""
        for i, (first, second) in enumerate([(5000, 5000), (9000, 100), (100, 9000), (4096, 4097)]):
            key, old, new = make_key(i), content(("old", i), first), content(("new", i), second)
            self.put(driver, key, old)
            self.put(driver, key, new)
            self.expect(driver, key, old, new, what=f"{second} bytes stored over {first}")

    def test_delete(self, driver: Driver) -> None:
        keys = [make_key(i) for i in range(6)]
        for i, key in enumerate(keys):
            self.put(driver, key, content(i, 3000))
        driver.delete([keys[1], make_key("never stored"), keys[4]])
        if not self.forgets:
            assert driver.exists(keys) == [True, False, True, True, False, True], "`exists` is wrong after `delete`"
        for i, key in enumerate(keys):
            self.judge(self.get(driver, key, 3000), [None if i in (1, 4) else content(i, 3000)], f"object {i} of 6")
        driver.delete([keys[1]])
        self.put(driver, keys[1], content("again", 2000))
        self.expect(driver, keys[1], content("again", 2000), what="stored again after a delete")

    def test_unusual_keys(self, driver: Driver) -> None:
        """Every part of a key counts, to its last bit, and no byte in it is special."""
        odd = b"/../\x00\n%s*?[]{}: \\\"'-_.~"
        keys = [
            ObjectKey(bytes(16), bytes(16)),
            ObjectKey(bytes(16), bytes(17)),
            ObjectKey(bytes(16), bytes(32)),
            ObjectKey(bytes(16), bytes(64)),
            ObjectKey(bytes(15) + b"\1", bytes(32)),
            ObjectKey(b"\xff" * 16, b"\xff" * 64),
            ObjectKey(b"\xff" * 16, b"\xff" * 63 + b"\xfe"),
            ObjectKey(odd[:16], odd[:16]),
            ObjectKey(odd[:16], odd),
            ObjectKey(b"-" * 16, b"-0-" * 8),
            *(ObjectKey(NAMESPACE, bytes(32), group) for group in (0, 1, 9, 10, 15, 16, 255, 2**31 - 1)),
            *(ObjectKey(NAMESPACE, bytes(31) + bytes([i])) for i in range(1, 20)),
            *(ObjectKey(NAMESPACE, bytes([i]) + bytes(31)) for i in range(1, 20)),
        ]
        outcomes = driver.store([source(key, content(key, 200 + i)) for i, key in enumerate(keys)])
        for key, outcome in zip(keys, outcomes, strict=True):
            assert outcome == Stored(), f"the key {key.name} was not stored: {outcome}"
        for i, key in enumerate(keys):
            self.expect(driver, key, content(key, 200 + i), what=f"the key {key.name} among similar ones")
        driver.delete(keys[::2])
        for i, key in enumerate(keys):
            expected = None if i % 2 == 0 else content(key, 200 + i)
            self.judge(self.get(driver, key, 300), [expected], f"the key {key.name} after its neighbours were deleted")

    @pytest.mark.parametrize("cuts", [(), (4096,)], ids=["one buffer", "two buffers"])
    def test_store_copies_the_buffers(self, driver: Driver, cuts: tuple[int, ...]) -> None:
        """The caller's memory is its own again when `store` has returned."""
        key, data = make_key("copied"), content("copied", 50_000)
        memory = aligned(len(data))
        memory[:] = data
        (outcome,) = driver.store([Item(key, split(memory, cuts))])
        assert outcome == Stored(), f"the store failed: {outcome}"
        assert bytes(memory) == data, "`store` changed the caller's buffers"
        memory[:] = bytes(len(memory))
        self.expect(driver, key, data, what="the caller reused its buffers after `store`")

    def test_load_lets_go_of_the_buffers(self, driver: Driver) -> None:
        """Nothing writes into the caller's memory once `load` has returned."""
        keys = [make_key(i) for i in range(8)]
        for i, key in enumerate(keys):
            self.put(driver, key, content(i, 40_000))
        rooms = [Room(40_000) for _ in keys]
        driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        for room in rooms:
            room.poison()
        driver.delete(keys[:4])
        self.put(driver, keys[5], content("new", 40_000))
        time.sleep(0.05)
        assert all(room.clean_from(0) for room in rooms), "the caller's buffers changed after `load` had returned"

    def test_registered_memory(self, driver: Driver) -> None:
        """Objects go from and to the arena that was registered, for a storage that declares `zero_copy`."""
        if not driver.storage.zero_copy:
            does_not_apply("the storage does not declare zero_copy")
        arena = aligned(1 << 20)
        driver.storage.register_memory(arena)
        data = content("arena", 300_001)
        arena[4096 : 4096 + len(data)] = data
        (stored,) = driver.store([Item(make_key("arena"), [memoryview(b"head"), arena[4096 : 4096 + len(data)]])])
        assert stored == Stored(), f"a store from the registered memory failed: {stored}"
        head, body = aligned(4), arena[524_288 : 524_288 + len(data)]
        (outcome,) = driver.load([Item(make_key("arena"), [head, body])])
        got = bytes(head) + bytes(body) if isinstance(outcome, Loaded) else None
        self.judge(got, [b"head" + data], "an object from and to the registered memory")

    def test_raw_bytes_are_the_object(self, driver: Driver, tmp_path: Path) -> None:
        """What the store really holds is the object: an encoding that only undoes itself would show here."""
        self.need("raw_read")
        for nbytes in (1, 4096, 10_001):
            key, data = make_key(nbytes), content(nbytes, nbytes)
            self.put(driver, key, data, (min(nbytes, 100),))
            raw = self.raw_read(driver.storage, tmp_path, key)
            assert raw == data, f"the store does not hold the {nbytes} bytes that were stored"
