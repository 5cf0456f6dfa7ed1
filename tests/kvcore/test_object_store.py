"""The object store from outside: objects between the caller's buffers and the tiers of this process."""

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_engine import hashes

from kvcore.api import ConfigError, LayoutError
from kvcore.engine import GroupSpec, LocalStore, ModelSpec, StoreSpace
from kvcore.engine.space import namespace
from kvcore.service import open_store

NBYTES = 3 * 7919 + 5
GOLDEN = [
    "0d18a5c48d7aa6ed98eec1a57c604a20",
    "e30ac6ccf6d96d21d38ee59b49279f38",
    "d50648ad2e84468051bc1191e67146e7",
]
Make = Callable[..., LocalStore]


def model(*groups: GroupSpec, name: str = "m") -> ModelSpec:
    return ModelSpec(
        "test", name, "w", "bfloat16", 2, "page", "cpu", "vec", 16, 1, groups or (GroupSpec(("a",), (NBYTES,)),)
    )


def content(seed: object, nbytes: int = NBYTES) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


def parts(data: bytes, seed: object = 0, pieces: int = 1) -> list[memoryview]:
    """Copies of `pieces` consecutive ranges of `data`, of odd sizes, each at an odd address."""
    rng = random.Random(str(seed))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(pieces - 1))
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        room = bytearray(end - begin + 16)
        at = rng.randrange(1, 15, 2)
        room[at : at + end - begin] = data[begin:end]
        found.append(memoryview(room)[at : at + end - begin])
    return found


def rooms(count: int, pieces: int = 1, nbytes: int = NBYTES) -> list[list[memoryview]]:
    return [parts(bytes(nbytes), i, pieces) for i in range(count)]


def joined(buffers: list[list[memoryview]]) -> list[bytes]:
    return [b"".join(each) for each in buffers]


def until(true: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def open_(text: str = "l2: [{storage: memory}]\n") -> LocalStore:
            path = tmp_path / "kvcore.yaml"
            path.write_text("lookup_timeout: 20s\n" + text.replace("FOLDER", str(tmp_path)))
            store = open_store(str(path))
            assert isinstance(store, LocalStore)
            stack.callback(store.close)
            return store

        yield open_


def put(store: LocalStore, space: StoreSpace, keys: list[bytes], pieces: int = 1) -> list[bool]:
    return store.store(space, keys, [parts(content(k), k, pieces) for k in keys])


def got(store: LocalStore, space: StoreSpace, keys: list[bytes], pieces: int = 1) -> list[bool]:
    """What `load` says; what it says is there has been compared with what was stored."""
    into = rooms(len(keys), pieces)
    arrived = store.load(space, keys, into)
    for key, there, data in zip(keys, arrived, joined(into), strict=True):
        assert not there or data == content(key)
    return arrived


TIERS = {
    "memory": "l2: [{storage: memory}]\n",
    "disk": "l2: [{storage: {plugin: disk, path: FOLDER/disk, capacity: 64MiB}}]\n",
    "serde": "l2: [{storage: memory, serde: [zstd]}]\n",
}


@pytest.mark.parametrize("text", TIERS.values(), ids=list(TIERS))
def test_objects_in_several_buffers_come_back_in_others(make: Make, text: str) -> None:
    store = make(text)
    space = store.register(model(), "test/1")
    keys = hashes(9)
    assert store.exists(space, keys) == [False] * 9
    assert store.prefix(space, keys) == 0
    assert put(store, space, keys[:6], pieces=5) == [True] * 6
    assert store.exists(space, keys) == [True] * 6 + [False] * 3
    assert store.prefix(space, keys) == 6
    assert got(store, space, keys, pieces=7) == [True] * 6 + [False] * 3
    assert got(store, space, keys[::-1]) == [False] * 3 + [True] * 6
    store.delete(space, [keys[2], keys[8]])
    assert store.exists(space, keys[:6]) == [True, True, False, True, True, True]
    assert store.prefix(space, keys) == 2


def test_what_is_one_models_tenants_groups_or_key_schemes_is_no_others(make: Make) -> None:
    store = make()
    two = (GroupSpec(("a",), (NBYTES,)), GroupSpec(("b",), (NBYTES,), window_tokens=64))
    mine = store.register(model(*two), "test/1")
    others = [
        store.register(model(*two), "test/2"),
        store.register(model(*two, name="n"), "test/1"),
        store.register(model(*two), "test/1", tenant="alice"),
    ]
    keys = hashes(3)
    assert store.store(mine, keys, [parts(content(k)) for k in keys], group=1) == [True] * 3
    assert store.exists(mine, keys, group=1) == [True] * 3
    assert store.exists(mine, keys) == [False] * 3
    for other in others:
        assert store.exists(other, keys, group=1) == [False] * 3
    again = store.register(model(*two), "test/1")
    assert store.load(again, keys, rooms(3), group=1) == [True] * 3
    for keys_name in ("", "no spaces", "x" * 201):
        with pytest.raises(ConfigError, match="key scheme"):
            store.register(model(), keys_name)
    with pytest.raises(LayoutError):
        store.register(model(GroupSpec((), ())), "test/1")


def test_what_cannot_be_an_object_is_refused_and_the_rest_is_served(make: Make) -> None:
    store = make()
    space = store.register(model(), "test/1")
    keys = hashes(2)
    released = memoryview(bytearray(NBYTES))
    released.release()
    wrong = [
        [memoryview(bytearray(NBYTES - 1))],
        [memoryview(bytearray(NBYTES)), memoryview(bytearray(1))],
        [memoryview(bytearray(2 * NBYTES))[::2]],
        [memoryview(bytearray(NBYTES)).cast("c")],
        [released],
        [bytes(NBYTES)],
        [],
        memoryview(bytearray(NBYTES)),
        None,
    ]
    for bad in wrong:
        assert store.store(space, keys, [bad, parts(content(keys[1]))]) == [False, True]  # type: ignore[list-item]
        assert store.load(space, keys, [bad, *rooms(1)]) == [False, True]  # type: ignore[list-item]
    read_only = [memoryview(bytes(NBYTES))]
    assert store.load(space, keys, [read_only, *rooms(1)]) == [False, True]
    assert store.store(space, [keys[0]], [read_only]) == [True]
    for no_hash in (b"", b"short", b"x" * 65, "text", None, 5):
        given = [no_hash, keys[1]]
        assert store.exists(space, given) == [False, True]  # type: ignore[arg-type]
        assert store.load(space, given, rooms(2)) == [False, True]  # type: ignore[arg-type]
        assert store.store(space, given, rooms(2)) == [False, True]  # type: ignore[arg-type]
        store.delete(space, [no_hash])  # type: ignore[list-item]
    assert store.store(space, keys, rooms(1)) == store.load(space, keys, rooms(3)) == [False, False]
    for group in (-1, 1):
        assert store.exists(space, keys, group) == store.load(space, keys, rooms(2), group) == [False, False]
        assert store.store(space, keys, rooms(2), group) == [False, False]
        store.delete(space, keys, group)
    assert store.exists(space, []) == store.load(space, [], []) == store.store(space, [], []) == []


def test_a_key_may_come_twice_in_a_batch(make: Make) -> None:
    store = make()
    space = store.register(model(), "test/1")
    a, b = hashes(2)
    assert put(store, space, [a, b, a, a]) == [True] * 4
    assert got(store, space, [b, a, b, a]) == [True] * 4
    assert store.exists(space, [a, b, a]) == [True] * 3


def test_each_tier_is_written_what_it_asks_for(make: Make) -> None:
    store = make(
        "l2: [{name: all, storage: memory}, {name: reused, storage: memory, write: reused}, "
        "{name: evicted, storage: memory, write: evicted}, {name: none, storage: memory, write: none}]\n"
    )
    space = store.register(model(), "test/1")
    keys = hashes(4)

    def held() -> list[int]:
        return [len(tier.storage._objects) for tier in store.manager.tiers]

    assert put(store, space, keys) == [True] * 4
    assert held() == [4, 0, 0, 0]
    assert put(store, space, keys[:2]) == [True] * 2
    assert held() == [4, 2, 0, 0]
    assert store.stats()['kvcore_tier_held_back_total{tier="reused"}'] == 4


def test_a_first_store_in_a_selective_tier_alone_is_no_store(make: Make) -> None:
    store = make("l2: [{storage: memory, write: reused}]\n")
    space = store.register(model(), "test/1")
    assert put(store, space, hashes(2)) == [False, False]
    assert put(store, space, hashes(3)) == [True, True, False]
    assert got(store, space, hashes(3)) == [True, True, False]


def test_a_store_without_tiers_is_a_wrong_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kvcore.yaml"
    path.write_text("l2: []\n")
    with pytest.raises(ConfigError, match="l2 is empty"):
        open_store(str(path))


def test_many_threads_at_once(make: Make) -> None:
    store = make("l2: [{storage: {plugin: disk, path: FOLDER/disk, capacity: 64MiB}}, {storage: memory}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(24)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                chosen = rng.sample(keys, rng.randrange(1, 12))
                if rng.random() < 0.4:
                    assert put(store, space, chosen, pieces=rng.randrange(1, 6)) == [True] * len(chosen)
                elif rng.random() < 0.2:
                    store.delete(space, chosen[:2])
                else:
                    got(store, space, chosen, pieces=rng.randrange(1, 6))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_closing_while_it_is_used_ends_all_calls(make: Make) -> None:
    store = make()
    space = store.register(model(), "test/1")
    keys = hashes(8)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                put(store, space, keys)
                got(store, space, keys)
                store.exists(space, keys)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # some calls, whichever
    store.close()
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert got(store, space, keys) == store.exists(space, keys) == put(store, space, keys) == [False] * 8


def held(store: LocalStore) -> list[int]:
    """How many objects each tier has."""
    return [len(tier.storage._objects) for tier in store.manager.tiers]


def test_what_a_later_tier_had_is_written_to_the_earlier_ones(make: Make) -> None:
    store = make(
        "l2: [{name: first, storage: memory}, {name: mine, storage: memory, promote: false}, "
        "{name: idle, storage: memory, write: none}, {name: last, storage: memory}, "
        "{name: again, storage: memory, write: reused}]\n"
    )
    space = store.register(model(), "test/1")
    keys = hashes(4)
    assert put(store, space, keys) == [True] * 4
    assert held(store) == [4, 4, 0, 4, 0]
    for tier in store.manager.tiers[:2]:
        tier.storage._objects.clear()
    assert got(store, space, keys[:3], pieces=3) == [True] * 3
    until(lambda: held(store) == [3, 0, 0, 4, 3], "promoted, and written where what is asked for again is wanted")
    assert store.stats()['kvcore_tier_promoted_total{tier="first"}'] == 3
    store.manager.tiers[3].storage._objects.clear()
    assert got(store, space, keys[:3]) == [True] * 3, "the copies are the objects"
    store.manager.tiers[0].storage._objects.clear()
    assert got(store, space, keys[:3]) == [True] * 3


def test_copies_for_other_tiers_take_bounded_memory(make: Make) -> None:
    store = make("l2: [{name: first, storage: memory}, {name: last, storage: memory}]\n")
    store._batches._promotion._room_bytes = 2 * NBYTES
    space = store.register(model(), "test/1")
    keys = hashes(5)
    put(store, space, keys)
    store.manager.tiers[0].storage._objects.clear()
    assert got(store, space, keys) == [True] * 5
    until(lambda: held(store) == [2, 5], "two are promoted")
    assert store.stats()['kvcore_tier_dropped_total{tier="first",reason="queue_full"}'] == 3
    until(lambda: store._batches._promotion._waiting_bytes == 0, "the memory is free")


def test_without_memory_for_copies_what_was_found_is_served(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make("l2: [{name: first, storage: memory}, {name: last, storage: memory}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(5)
    assert put(store, space, keys) == [True] * 5
    store.manager.tiers[0].storage._objects.clear()

    def no_memory(objects: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvcore.control.promotion._copies", no_memory)
        assert got(store, space, keys) == [True] * 5
    assert store._batches._promotion._waiting_bytes == 0
    assert store.stats()['kvcore_tier_dropped_total{tier="first",reason="queue_full"}'] == 5
    assert got(store, space, keys) == [True] * 5
    until(lambda: held(store) == [5, 5], "promoted now")


FAULTY = "{name: NAME, timeout: 500ms, storage: {plugin: faulty, storage: memory, FAULTS}}"


def faulty(name: str, faults: str) -> str:
    return FAULTY.replace("NAME", name).replace("FAULTS", faults)


def recover(store: LocalStore) -> None:
    from kvcore.testing.fault_config import Faults

    for tier in store.manager.tiers:
        if hasattr(tier.storage, "faults"):
            tier.storage.faults = Faults()


def test_a_tier_that_does_not_answer_holds_up_nobody_whom_another_serves(make: Make) -> None:
    store = make(f"l2: [{faulty('slow', 'hang_rate: 1, operations: [exists, load]')}, {{storage: memory}}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(4)
    assert put(store, space, keys[:2]) == [True, True]
    begun = time.monotonic()
    assert store.exists(space, keys[:2]) == got(store, space, keys[:2]) == [True, True]
    assert time.monotonic() - begun < 5
    assert store.exists(space, keys) == [True, True, False, False]
    recover(store)


def test_what_may_be_in_a_tier_that_is_left_alone_is_not_counted_as_absent(make: Make) -> None:
    store = make("l2: [{name: t, storage: memory}, {name: u, storage: memory}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(3)

    async def leave_alone() -> None:
        store.manager.tiers[0].breaker.open("test")

    store.manager.loop.submit(leave_alone()).result(60)
    assert store.exists(space, keys) == got(store, space, keys) == [False] * 3
    counted = {name: n for name, n in store.stats().items() if name.startswith("kvcore_miss_chunks_total") and n}
    assert counted == {'kvcore_miss_chunks_total{reason="tier_down"}': 6}


@pytest.mark.parametrize("faults", ["error_rate: 1", "fail_rate: 1", "hang_rate: 1", "torn_rate: 1", "flip_rate: 1"])
def test_faults_are_misses_in_bounded_time_and_never_wrong_bytes(make: Make, faults: str) -> None:
    store = make(f"l2: [{faulty('bad', faults)}, {faulty('worse', 'lost_rate: 0.5, fail_rate: 0.3, seed: 3')}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(12)
    timer = threading.Timer(20, recover, (store,))  # a call that hangs has lent memory: it is over when that is let go
    if faults.startswith("hang"):
        timer = threading.Timer(3, recover, (store,))
    timer.start()
    for _ in range(3):
        put(store, space, keys, pieces=3)
        got(store, space, keys, pieces=2)
        store.exists(space, keys)
        store.delete(space, keys[:1])
    timer.cancel()
    recover(store)
    until(lambda: all(tier.breaker.closed for tier in store.manager.tiers), "they are well")
    assert put(store, space, keys) == [True] * 12
    assert got(store, space, keys) == [True] * 12


def test_a_load_that_hangs_ends_when_its_memory_is_let_go(make: Make) -> None:
    store = make(f"l2: [{faulty('bad', 'hang_rate: 1, operations: [load]')}]\n")
    space = store.register(model(), "test/1")
    keys = hashes(1)
    assert put(store, space, keys) == [True]
    into = rooms(1)
    done = threading.Event()
    answers: list[list[bool]] = []

    def load() -> None:
        answers.append(store.load(space, keys, into))
        done.set()

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: store.manager.tiers[0].stuck_s is not None, "it hangs")
    assert not done.is_set(), "the storage may still write into the caller's memory"
    assert got(store, space, keys) == [False], "others are lent no memory of theirs"
    recover(store)
    assert done.wait(60)
    thread.join()
    assert answers == [[False]]


def test_a_stalled_loop_is_a_miss(make: Make) -> None:
    store = make()
    space = store.register(model(), "test/1")
    keys = hashes(2)
    assert put(store, space, keys) == [True] * 2
    let_go = threading.Event()
    store._batches.limit_s = 0.2
    store.manager.config = store.manager.config.model_copy(update={"lookup_timeout": 0.2})
    store.manager.loop.post(let_go.wait, 60)  # as a plugin that blocks the loop
    assert store.exists(space, keys) == [False] * 2
    into = rooms(2)
    assert store.load(space, keys, into) == [False] * 2
    assert put(store, space, hashes(2, "x")) == [False] * 2
    store.delete(space, keys)
    let_go.set()
    store._batches.limit_s = 60.0
    assert got(store, space, keys) == [True] * 2
    assert joined(into) == [bytes(NBYTES)] * 2, "what was given up is not written late"
    assert store.exists(space, hashes(2, "x")) == [False] * 2


def test_the_namespace_of_a_group_is_pinned() -> None:
    """What is stored is found by other releases, and by a server: docs/format.md."""
    two = model(GroupSpec(("a",), (NBYTES,)), GroupSpec(("b", "c"), (512, 1024), window_tokens=64))
    (one,) = StoreSpace(model(), "test/1", "").group_specs()
    assert one == model()
    names = [namespace(m, 16, "test/1", [], "", "") for m in (one, *StoreSpace(two, "test/1", "").group_specs())]
    assert [name.hex() for name in names] == GOLDEN


@pytest.mark.parametrize("storage", ["plugin: memory", "plugin: disk, path: FOLDER/disk"])
@pytest.mark.parametrize("fit", [4, 30])
def test_of_a_batch_larger_than_a_tier_the_front_is_kept(make: Make, storage: str, fit: int) -> None:
    """`True` is not said of what the same batch has pushed out, and what is kept is no matter of chance."""
    capacity = fit * (4096 + -(-NBYTES // 4096) * 4096)
    store = make(f"l2: [{{storage: {{{storage}, capacity: {capacity}B}}}}]\n")
    space = store.register(model(), "test/1")
    for round_ in range(3):
        keys = hashes(3 * fit, str(round_))
        stored = put(store, space, keys)
        kept = stored.index(False)
        assert fit <= kept < 2 * fit
        assert stored == [True] * kept + [False] * (3 * fit - kept)
        assert store.exists(space, keys) == got(store, space, keys) == stored


def test_a_bug_is_a_miss_that_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = make()
    space = store.register(model(), "test/1")

    async def bug(*given: object, **more: object) -> list[bool]:
        raise RuntimeError("a bug")

    store._batches.load = bug  # type: ignore[method-assign]
    assert store.load(space, hashes(1), rooms(1)) == [False]
    assert "a request to the tiers failed; it counts as a miss" in caplog.text
