"""A real gateway that refuses, dies, comes back, hangs; objects that are not ours; keys that stay secret."""

import ctypes
import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
from nixl_place import in_bucket, make_nixl

from docs_blocks import lines
from kvcore.api import MISSING, STORED, Failed, Loaded, StorageError
from kvcore.testing.driver import Driver
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers import free_port
from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS
from kvcore_nixl.objects import SUFFIX

BUCKET = "kvcore-test"


def put(driver: Driver, number: int, nbytes: int = 100_000) -> object:
    return driver.store([source(make_key(number), content(number, nbytes), (4096,))])[0]


def get(driver: Driver, number: int) -> object:
    """The object's bytes, or the outcome when it was not loaded."""
    room = Room(200_000)
    (outcome,) = driver.load([room.item(make_key(number))])
    return bytes(room.view[: outcome.nbytes]) if isinstance(outcome, Loaded) else outcome


def name(number: int, prefix: str = "test/") -> str:
    return f"{prefix}{make_key(number).name}{SUFFIX}"


# -- refused at open -------------------------------------------------------------------------------------------------


def test_a_wrong_secret(gateway: JuiceFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with (
        pytest.raises(
            StorageError, match=r"refuses the credentials \(SignatureDoesNotMatch\): check AWS_ACCESS"
        ) as caught,
        in_bucket(gateway.endpoint),
    ):
        pass
    assert "not-the-secret" not in str(caught.value)


def test_no_credentials(gateway: JuiceFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(StorageError, match=r"no credentials: set AWS_ACCESS_KEY_ID"), in_bucket(gateway.endpoint):
        pass


def test_a_bucket_that_does_not_exist(gateway: JuiceFS) -> None:
    with (
        pytest.raises(StorageError, match=r"bucket 'absent' at http://.* does not exist: create it"),
        Driver(make_nixl(backend="obj", bucket="absent", endpoint=gateway.endpoint)),
    ):
        pass


def test_nobody_answers(gateway: JuiceFS) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StorageError, match=f"at {endpoint} does not answer .*check `endpoint`"), in_bucket(endpoint):
        pass


def test_keys_from_a_file(gateway: JuiceFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    file = tmp_path / "credentials"
    file.write_text(f"[cache]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    with in_bucket(gateway.endpoint, "from-a-file/", credentials_file=str(file), profile="cache") as driver:
        assert put(driver, 0) == STORED
        assert get(driver, 0) == content(0, 100_000)
    with (
        pytest.raises(StorageError, match="nobody"),
        in_bucket(gateway.endpoint, credentials_file=str(file), profile="nobody"),
    ):
        pass


def test_the_endpoint_of_the_environment_is_nixls_too(gateway: JuiceFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gateway.endpoint)
    with Driver(make_nixl(backend="obj", bucket=BUCKET, prefix="environment/")) as driver:
        assert put(driver, 0) == STORED
        assert get(driver, 0) == content(0, 100_000)


def test_nixl_does_not_get_there(gateway: JuiceFS) -> None:
    """boto3 does, so that only NIXL can tell."""
    params = {"endpoint_override": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(StorageError, match="NIXL cannot ask"), in_bucket(gateway.endpoint, params=params):
        pass


def test_secrets_stay_secret(gateway: JuiceFS, caplog: pytest.LogCaptureFixture) -> None:
    """In logs, errors and what the configuration shows; and the environment is as it was."""
    with caplog.at_level(logging.DEBUG, "kvcore"), in_bucket(gateway.endpoint, "secret/") as driver:
        assert put(driver, 0) == STORED
        assert SECRET_KEY not in repr(vars(driver.storage))
    assert SECRET_KEY not in caplog.text
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for variable in ("AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"):
        assert variable not in os.environ
        assert getenv(variable.encode()) is None


# -- what lies in the bucket -----------------------------------------------------------------------------------------


def test_a_thousand_keys_every_third_missing(gateway: JuiceFS) -> None:
    with in_bucket(gateway.endpoint, "thousand/") as driver:
        keys = [make_key(i) for i in range(1000)]
        there = [i % 3 != 2 for i in range(1000)]
        stored = [i for i in range(1000) if there[i]]
        assert driver.store([source(keys[i], content(i, 100 + i)) for i in stored]) == [STORED] * len(stored)
        assert driver.exists(keys) == there
        rooms = [Room(2000) for _ in keys]
        outcomes = driver.load([room.item(key) for room, key in zip(rooms, keys, strict=True)])
        assert outcomes == [Loaded(100 + i) if there[i] else MISSING for i in range(1000)]
        assert all(rooms[i].view[: 100 + i] == content(i, 100 + i) for i in stored)
        assert sorted(e.nbytes for e in driver.entries()) == [100 + i for i in stored]


def test_objects_that_are_not_ours(gateway: JuiceFS) -> None:
    """Other keys are not listed; other bytes under our key are corrupt, and a store replaces them."""
    client = boto3.client("s3", endpoint_url=gateway.endpoint, region_name="us-east-1")
    with in_bucket(gateway.endpoint, "foreign/") as driver:
        for i in range(3):
            assert put(driver, i) == STORED
        strays = ("notes.txt", make_key(7).name, f"sub/{make_key(8).name}{SUFFIX}", f"nonsense{SUFFIX}")
        for stray in strays:
            client.put_object(Bucket=BUCKET, Key=f"foreign/{stray}", Body=b"x" * 100)
        whole = client.get_object(Bucket=BUCKET, Key=name(0, "foreign/"))["Body"].read()
        for number, body in ((0, b"#!/bin/sh\n" * 5000), (1, whole[:50_000]), (2, b"")):
            client.put_object(Bucket=BUCKET, Key=name(number, "foreign/"), Body=body)
        for number in range(3):
            outcome = get(driver, number)
            assert isinstance(outcome, Failed), outcome
            assert outcome.kind == ("corrupt" if number < 2 else "io")  # a range of nothing is an error of the server
            assert put(driver, number) == STORED
            assert get(driver, number) == content(number, 100_000)
        assert {entry.key for entry in driver.entries()} == {make_key(i) for i in range(3)}
        assert all(entry.used_s == pytest.approx(time.time(), abs=60) for entry in driver.entries())


# -- a gateway that dies, comes back, hangs --------------------------------------------------------------------------


def test_killed_and_started_again(own: JuiceFS) -> None:
    """Calls fail, soon; it is used again without a word when it is back, and has what it had."""
    with in_bucket(own.endpoint) as driver:
        assert put(driver, 0) == STORED
        own.kill()
        begun = time.monotonic()
        for outcome in (put(driver, 1), get(driver, 0)):
            assert isinstance(outcome, Failed)
            assert outcome.kind == "io"
            assert "bucket 'kvcore-test'" in outcome.reason
        with pytest.raises(StorageError, match="NIXL cannot ask"):
            driver.exists([make_key(0)])
        for call in (lambda: driver.call("ping"), lambda: driver.delete([make_key(0)]), driver.entries):
            with pytest.raises(StorageError, match="does not answer"):
                call()
        assert time.monotonic() - begun < 60  # 10 s at most; with the AWS library's own retries it would be 75 s
        own.start()
        assert get(driver, 0) == content(0, 100_000)
        assert put(driver, 1) == STORED


@pytest.mark.parametrize("call", ["load", "store"])
def test_frozen(own: JuiceFS, call: str) -> None:
    """A call that hangs does not return, since the gateway may still send: its memory is not given back until then."""
    with in_bucket(own.endpoint) as driver:
        assert put(driver, 0) == STORED
        room = Room(200_000)
        item = room.item(make_key(0)) if call == "load" else source(make_key(1), content(1, 100_000), (4096,))
        own.freeze()
        pending = driver.submit(call, [item])
        time.sleep(2)
        assert not pending.done()
        assert room.clean_from(0)
        own.thaw()
        assert driver.wait(pending, call) == [Loaded(100_000) if call == "load" else STORED]
        assert get(driver, 0) == content(0, 100_000)
        if call == "store":
            assert get(driver, 1) == content(1, 100_000)


HANGING = """
import sys, threading
from nixl_place import in_bucket
from kvcore.testing.memory import content, make_key, source
driver = in_bucket(sys.argv[1]).__enter__()
print("ready", flush=True)
sys.stdin.readline()
driver.submit("store", [source(make_key(0), content(0, 100_000))])
threading.Event().wait(1)
print("closing", flush=True)
driver.close()
print("closed", flush=True)
"""


def test_a_process_ends_while_a_call_hangs(own: JuiceFS) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, own.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        own.freeze()
        try:
            rest, _ = child.communicate("go\n", timeout=60)
        finally:
            own.thaw()
            child.kill()
        assert rest == "closing\nclosed\n"
        assert child.returncode == 0


def test_a_bucket_as_the_readme_makes_it(gateway: JuiceFS) -> None:
    """plugins/storage_nixl/README.md"""
    (line,) = lines("plugins/storage_nixl/README.md", "python -c")
    _, *words = shlex.split(line.replace("http://127.0.0.1:PORT", gateway.endpoint))
    subprocess.run([sys.executable, *words], check=True, timeout=240)
    found = boto3.client("s3", endpoint_url=gateway.endpoint).list_buckets()["Buckets"]
    assert "kv-cache" in [bucket["Name"] for bucket in found]
