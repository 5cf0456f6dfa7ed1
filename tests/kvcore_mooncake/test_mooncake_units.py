"""The parts that need no pool: options and the JSON file, codes, memory, layouts, the probe, the library."""

import ctypes
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcore.api import StorageError
from kvcore.api.buffers import address_of
from kvcore.testing.memory import aligned, content, split
from kvcore.testing.servers import free_port
from kvcore_mooncake import errors, probe
from kvcore_mooncake.config import MooncakeConfig, host_and_port, resolve
from kvcore_mooncake.library import load_library
from kvcore_mooncake.memory import Region, Staging, StagingFull
from kvcore_mooncake.transfer import batches, cut, from_staging, lay_out, pieces, staged_bytes, to_staging

MIB = 1 << 20
MASTER = "10.0.0.1:50051"


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("master_server_address", "10.0.0.1", "write HOST:PORT, such as 10.0.0.1:50051"),
        ("master_server_address", "10.0.0.1:70000", "write HOST:PORT"),
        ("master_server_address", "10.0.0.1:x", "write HOST:PORT"),
        ("protocol", "t c p", "not a protocol of Mooncake"),
        ("metadata_server", "", "at least 1 character"),
        ("key_prefix", "two words", "not a key prefix: up to 200 letters"),
        ("key_prefix", "a,b", "not a key prefix"),
        ("key_prefix", "x" * 201, "not a key prefix"),
        ("admin_address", "10.0.0.1", "write HOST:PORT, such as 10.0.0.1:9003"),
        ("pin", "firm", "'none', 'soft' or 'hard'"),
        ("replica_num", 0, "greater than or equal to 1"),
        ("staging_size", "1KiB", "greater than or equal to"),
        ("global_segment_size", "much", "write a number and a unit"),
        ("transfer_timeout", "100ms", "greater than or equal to 1"),
        ("rpc_timeout", "0s", "greater than 0"),
        ("segment_size", "1GiB", "Extra inputs are not permitted"),
    ],
)
def test_wrong_options(option: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(complaint)):
        MooncakeConfig.model_validate({option: value})


def test_options_are_normalized() -> None:
    config = MooncakeConfig.model_validate({"protocol": "RDMA", "global_segment_size": "3GiB", "rpc_timeout": "500ms"})
    assert (config.protocol, config.global_segment_size, config.rpc_timeout) == ("rdma", 3 << 30, 0.5)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:50051", ("10.0.0.1", 50051)),
        ("mooncake-master.svc:1", ("mooncake-master.svc", 1)),
        ("[::1]:50051", ("::1", 50051)),
        ("::1:50051", None),
        ("host:0", None),
        ("host:65536", None),
        ("host", None),
        ("etcd://10.0.0.1:2379", None),
    ],
)
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    assert host_and_port(address) == parts


# -- the JSON file ---------------------------------------------------------------------------------------------------


def written(path: Path, **settings: Any) -> Path:
    path.write_text(json.dumps(settings))
    return path


def resolved(config: MooncakeConfig, environ: dict[str, str] | None = None) -> MooncakeConfig:
    warnings: list[str] = []
    found = resolve(config, environ or {}, warnings.append)
    assert warnings == []
    return found


def test_precedence(tmp_path: Path) -> None:
    """YAML, then `config_path`, then the environment variable, then the defaults."""
    one = written(tmp_path / "one.json", master_server_address=MASTER, protocol="RDMA", device_name="mlx5_0")
    two = written(tmp_path / "two.json", master_server_address="10.9.9.9:1", local_hostname="two")
    environ = {"MOONCAKE_CONFIG_PATH": str(two)}
    config = resolved(MooncakeConfig(config_path=one, protocol="tcp"), environ)
    assert (config.master_server_address, config.protocol, config.device_name) == (MASTER, "tcp", "mlx5_0")
    assert (config.local_hostname, config.metadata_server, config.local_buffer_size) == ("", "P2PHANDSHAKE", 0)
    config = resolved(MooncakeConfig(), environ)
    assert (config.master_server_address, config.local_hostname, config.protocol) == ("10.9.9.9:1", "two", "tcp")
    config = resolved(MooncakeConfig(master_server_address=MASTER), environ)
    assert (config.master_server_address, config.local_hostname) == (MASTER, "two")
    assert resolved(MooncakeConfig(master_server_address=MASTER)).local_hostname == ""


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (3355443200, 3355443200),
        ("1024", 1024),
        ("3gb", 3 << 30),
        ("1.5 GB", 3 << 29),
        ("16MiB", 16 << 20),
        ("64m", 64 << 20),
        ("7b", 7),
    ],
)
def test_sizes_of_the_file(tmp_path: Path, size: int | str, nbytes: int) -> None:
    path = written(tmp_path / "c.json", master_server_address=MASTER, global_segment_size=size, local_buffer_size=None)
    config = resolved(MooncakeConfig(config_path=path))
    assert (config.global_segment_size, config.local_buffer_size) == (nbytes, 0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"global_segment_size": "much"}, "c.json: global_segment_size is 'much': a number of bytes is needed"),
        ({"global_segment_size": -1}, "global_segment_size is -1"),
        ({"global_segment_size": True}, "global_segment_size is True"),
        ({"protocol": 5}, "c.json: protocol is 5: a string is needed"),
        ({"protocol": ""}, "c.json: protocol: '' is not a protocol"),
        ({"master_server_address": "here"}, "c.json: master_server_address: 'here' is not the address of a master"),
        ({}, "no master is named: set `master_server_address: HOST:PORT`"),
    ],
)
def test_wrong_settings_of_the_file(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    path = written(tmp_path / "c.json", **settings)
    with pytest.raises(StorageError, match=re.escape(complaint)):
        resolved(MooncakeConfig(config_path=path))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent\.json, named by `config_path`, cannot be read: No such file"):
        resolved(MooncakeConfig(config_path=tmp_path / "absent.json"))
    with pytest.raises(StorageError, match="named by the environment variable MOONCAKE_CONFIG_PATH, cannot be read"):
        resolved(MooncakeConfig(), {"MOONCAKE_CONFIG_PATH": str(tmp_path)})
    for text in ("{", "\0", "[1]", '"text"'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(StorageError, match=r"c\.json, named by `config_path`, is not"):
            resolved(MooncakeConfig(config_path=tmp_path / "c.json"))


def test_settings_without_effect_are_told(tmp_path: Path) -> None:
    settings = {"tenant_id": "a", "enable_ssd_offload": True, "client_http_port": 9300}
    path = written(tmp_path / "c.json", master_server_address=MASTER, **settings)
    warnings: list[str] = []
    resolve(MooncakeConfig(config_path=path), {}, warnings.append)
    assert len(warnings) == 2
    assert all("does not support: it is ignored" in warning for warning in warnings)


# -- codes -----------------------------------------------------------------------------------------------------------


def test_codes_in_words() -> None:
    assert errors.words(-200) == "no space in any segment of the pool (Mooncake error -200)"
    assert errors.words(-4711) == "unknown error (Mooncake error -4711)"
    kinds = {code: errors.kind(code) for code in (-1, -200, -600, -707, -800, -900, -901, -4711)}
    assert kinds == {
        -1: "io", -200: "full", -600: "io", -707: "timeout", -800: "io", -900: "io", -901: "timeout", -4711: "io",
    }  # fmt: skip


# -- memory ----------------------------------------------------------------------------------------------------------


class Registrations:
    """What a client would have registered."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.most = 0

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.held
        self.held[address] = nbytes
        self.most = max(self.most, sum(self.held.values()))

    def unregister(self, address: int) -> None:
        del self.held[address]

    def staging(self, limit: int) -> Staging:
        return Staging(self.register, self.unregister, limit)


def test_staging_is_registered_once_and_reused() -> None:
    registered = Registrations()
    staging = registered.staging(8 * MIB)
    for nbytes in (1, 4096, MIB, 1):
        with staging.lend(nbytes) as address:
            assert registered.held == {address: MIB}
    with staging.lend(MIB + 1) as two, staging.lend(5) as one:
        assert registered.held == {one: MIB, two: 2 * MIB}
    with staging.lend(0):
        pass
    assert sum(registered.held.values()) == 3 * MIB


def test_staging_keeps_to_its_limit() -> None:
    """Free buffers that are too small give way to a larger one."""
    registered = Registrations()
    staging = registered.staging(8 * MIB)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(staging.lend(MIB))
    with staging.lend(6 * MIB) as large:
        assert registered.held[large] == 6 * MIB
    with staging.lend(8 * MIB) as larger:
        assert registered.held == {larger: 8 * MIB}
    with pytest.raises(StagingFull, match="8 MiB: raise it"), staging.lend(8 * MIB + 1):
        pass
    assert registered.most <= 8 * MIB


def test_staging_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = Registrations()
    staging = registered.staging(2 * MIB)
    with staging.lend(2 * MIB):
        got = threading.Event()

        def wait() -> None:
            with staging.lend(MIB):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.1)
    assert got.wait(10)
    waiting.join()
    monkeypatch.setattr("kvcore_mooncake.memory.WAIT_S", 0.1)
    with staging.lend(2 * MIB), pytest.raises(StagingFull, match="in use by other calls"), staging.lend(1):
        pass


def test_who_needs_little_does_not_wait_for_who_needs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back wakes all: it may do for one, and not for who has waited longer."""
    staging = Registrations().staging(3 * MIB)
    told = threading.Semaphore(0)
    wait_for = staging._changed.wait_for

    def heard(fits: Callable[[], bool], timeout_s: float) -> bool:
        told.release()  # the lock is held until it waits
        return wait_for(fits, 20 * timeout_s)

    monkeypatch.setattr(staging._changed, "wait_for", heard)
    over, got = threading.Event(), threading.Event()

    def much() -> None:
        with staging.lend(3 * MIB):
            assert over.is_set()

    def little() -> None:
        with staging.lend(MIB):
            got.set()

    threads = []
    with staging.lend(2 * MIB):
        with staging.lend(MIB):
            for need in (much, little):
                threads.append(threading.Thread(target=need))
                threads[-1].start()
                assert told.acquire(timeout=60)
                with staging._changed:  # by now it waits
                    pass
        assert got.wait(20)
        over.set()
    for thread in threads:
        thread.join(60)


def test_a_refused_registration_takes_nothing() -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise StorageError("no")

    staging = Staging(refuse, lambda address: None, MIB)
    for _ in range(3):
        with pytest.raises(StorageError, match="no"), staging.lend(MIB):
            pass


def test_released_views_are_found_out() -> None:
    view = memoryview(bytearray(10))
    view.release()
    with pytest.raises(ValueError, match="released"):
        pieces([view], [])


@given(
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    direct=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
    wanted=st.integers(0, 5000),
)
def test_layouts_move_the_bytes_in_order(cuts: list[int], direct: tuple[int, int], wanted: int) -> None:
    """Whatever is direct and however it is cut: the ranges given to Mooncake are the object, front to back."""
    memory, staging = aligned(5000), aligned(5000)
    memory[:] = data = content(cuts, 5000)
    start = address_of(memory)
    region = Region(start + min(direct), start + max(direct))
    room = cut(pieces(split(memory, cuts), [region]), wanted)
    assert sum(part.nbytes for part in room) == wanted
    layout = lay_out([room], address_of(staging))
    to_staging(layout.copies[0])
    ranges = list(zip(layout.pointers[0], layout.sizes[0], strict=True))
    assert b"".join(read(pointer, nbytes) for pointer, nbytes in ranges) == data[:wanted]
    assert all(nbytes for _, nbytes in ranges)
    kinds = []
    for pointer, nbytes in ranges:
        inside = region.start <= pointer and pointer + nbytes <= region.end
        staged = address_of(staging) <= pointer and pointer + nbytes <= address_of(staging) + staged_bytes(room)
        assert inside or staged, "a range of memory that is not registered, or is so in two pieces"
        kinds.append(inside)
    assert not any(a is b is False for a, b in pairwise(kinds)), "what is staged together is one request"
    for i in range(staged_bytes(room)):
        staging[i] ^= 0xFF
    from_staging(layout.copies[0])
    changed = sum(a != b for a, b in zip(memory, data, strict=True))
    assert changed == staged_bytes(room)
    assert memory[wanted:] == data[wanted:]


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 150))
def test_batches_are_complete_and_bounded(staged: list[int], at_most: int) -> None:
    found = batches(staged, at_most)
    assert [i for batch in found for i in batch] == list(range(len(staged)))
    assert all(len(batch) == 1 or sum(staged[i] for i in batch) <= at_most for batch in found)


# -- the probe -------------------------------------------------------------------------------------------------------


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A server that accepts, and answers, or hangs up (b''), or says nothing (None)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    taken.append(connection)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in taken:
            connection.close()


def test_who_answers() -> None:
    for answer, alive in ((b"", True), (b"hello", True), (None, False)):
        with listener(answer) as port:
            assert probe.answers(f"127.0.0.1:{port}", 0.3) is alive
    assert not probe.answers(f"127.0.0.1:{free_port()}", 0.3)
    assert not probe.answers("no-such-host.invalid:5", 0.3)
    assert probe.answers("etcd://127.0.0.1:1")


def test_metadata_servers() -> None:
    dead = free_port()
    with listener(None) as port:
        assert probe.accepts(f"http://127.0.0.1:{port}/metadata")
        assert probe.accepts(f"etcd://127.0.0.1:{dead};127.0.0.1:{port}")
    assert not probe.accepts(f"http://127.0.0.1:{dead}/metadata")
    assert probe.accepts("P2PHANDSHAKE")
    assert probe.accepts("redis://somewhere")


def test_our_own_address() -> None:
    assert probe.own_address("127.0.0.1:50051") == "127.0.0.1"
    assert probe.own_address("etcd://127.0.0.1:2379") == socket.gethostname()


# -- the library -----------------------------------------------------------------------------------------------------


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageError) as caught:
        load_library(MooncakeConfig())
    for word in ("mooncake-transfer-engine`", "mooncake-transfer-engine-non-cuda`", "0.3.13", "libibverbs1"):
        assert word in str(caught.value)


def test_an_old_library(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("mooncake.store")
    old.MooncakeDistributedStore = type("Store", (), {"setup": None, "close": None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", old)
    with pytest.raises(StorageError, match=r"too old, it has no .*batch_remove.*0\.3\.13 or newer"):
        load_library(MooncakeConfig())


def test_deadlines_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set before it is loaded, unless the user has."""
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "777")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageError):
        load_library(MooncakeConfig.model_validate({"transfer_timeout": "3500ms", "rpc_timeout": "1500ms"}))
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "4"
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "777"
    assert os.environ["MC_LOG_LEVEL"] == "ERROR"
