"""The same against Ceph's radosgw, another S3 server altogether: the suite, encryption with KMS keys, quotas, rights.

It needs Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common. Without them nothing here is tested, and the
run says so.
"""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_s3_conformance as conformance
from s3_place import BUCKET, name_of, opened, prefix_of, put, raw_client

from kvcore.api import Loaded, StorageError, Stored
from kvcore.testing import StorageConformance
from kvcore.testing.memory import Room, content, make_key, source
from kvcore.testing.servers import ServerError
from kvcore.testing.servers.s3 import Radosgw
from moved import get, keys_of, kind

MIB = 1 << 20
KEY = "kvcore-key"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    key = base64.b64encode(os.urandom(32)).decode()
    try:
        ceph = Radosgw(tmp_path_factory.mktemp("ceph"), kms_keys={KEY: key})
    except ServerError as error:
        pytest.skip(f"NOT TESTED: {error}")
    with ceph:
        raw_client(ceph.endpoint).create_bucket(Bucket=BUCKET)
        raw_client(ceph.endpoint).put_object(Bucket=BUCKET, Key="first", Body=b"")  # makes pools, which takes 2 s
        yield ceph


class TestRadosgw(conformance.TestS3Conformance):
    model_examples = 2

    @pytest.fixture(autouse=True)
    def _place(self, ceph: Radosgw, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(conformance.ENDPOINT, ceph.endpoint)

    judge = StorageConformance.judge


@pytest.mark.parametrize("nbytes", [0, 1000, 12 * MIB + 3])
def test_sse_kms(ceph: Radosgw, tmp_path: Path, nbytes: int) -> None:
    """Whole and in parts; the server confirms the key, and whoever may read the object gets it decrypted."""
    prefix, key = prefix_of(tmp_path), make_key(1)
    encryption = {"encryption": "sse-kms", "kms_key_id": KEY}
    with opened(ceph.endpoint, prefix=prefix, part_size="5MiB", **encryption) as driver:
        assert driver.store([source(key, content(key, nbytes), (4096,))]) == [Stored()]
        assert get(driver, [key], nbytes) == ["ok"]
    head = raw_client(ceph.endpoint).head_object(Bucket=BUCKET, Key=name_of(key, prefix))
    assert head["ServerSideEncryption"] == "aws:kms"
    assert head["SSEKMSKeyId"] == KEY
    with opened(ceph.endpoint, prefix=prefix, part_size="5MiB") as driver:
        assert get(driver, [key], nbytes) == ["ok"]


def test_a_kms_key_that_is_not_there(ceph: Radosgw, tmp_path: Path) -> None:
    with opened(ceph.endpoint, prefix=prefix_of(tmp_path), encryption="sse-kms", kms_key_id="other") as driver:
        (outcome,) = driver.store([source(make_key(1), b"x")])
        assert kind(outcome) == "io"
        assert "PutObject" in str(outcome)


def test_parts(ceph: Radosgw, tmp_path: Path) -> None:
    keys = keys_of(3)
    with opened(ceph.endpoint, prefix=prefix_of(tmp_path), part_size="5MiB") as driver:
        assert put(driver, keys[:2], 21 * MIB + 1) == ["ok"] * 2
        assert get(driver, keys, 21 * MIB + 1) == ["ok", "ok", "missing"]
        driver.delete(keys)
        assert driver.entries() == []


def test_parts_of_two_versions_never_mix(ceph: Radosgw, tmp_path: Path) -> None:
    """All parts at once, while the object is overwritten: one version, whole."""
    prefix, key, nbytes = prefix_of(tmp_path), make_key(1), 22 * MIB
    versions = [content(("version", i), nbytes - i * 3 * MIB) for i in range(4)]
    raw = raw_client(ceph.endpoint)
    with opened(ceph.endpoint, prefix=prefix, part_size="5MiB", deadline="20s") as driver:
        assert driver.store([source(key, versions[0])]) == [Stored()]
        for new in versions[1:]:
            room = Room(nbytes)
            call = driver.submit("load", [room.item(key)])
            raw.put_object(Bucket=BUCKET, Key=name_of(key, prefix), Body=new)
            (outcome,) = driver.wait(call, "load")
            assert isinstance(outcome, Loaded)
            assert bytes(room.view[: outcome.nbytes]) in versions


def test_a_quota_is_full(ceph: Radosgw, tmp_path: Path) -> None:
    """It does not count against the tier, and what is there is loaded."""
    ceph.add_user("limited", "secret-of-limited", max_objects=3)
    user: dict[str, Any] = {"access_key_id": "limited", "secret_access_key": "secret-of-limited"}
    with opened(ceph.endpoint, bucket="limited", create_bucket=True, part_size="5MiB", **user) as driver:
        found = [put(driver, [key])[0] for key in keys_of(20)]
        there = found.index("full")
        assert found == ["ok"] * there + ["full"] * (20 - there)
        assert 1 <= there <= 4
        assert put(driver, [make_key("large")], 6 * MIB) == ["full"]
        assert get(driver, keys_of(there)) == ["ok"] * there


def test_a_reader_and_a_stranger(ceph: Radosgw, tmp_path: Path) -> None:
    for name in ("reader", "stranger"):
        ceph.add_user(name, f"secret-of-{name}")
    raw = raw_client(ceph.endpoint)
    raw.create_bucket(Bucket="theirs")
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": ["arn:aws:s3:::theirs", "arn:aws:s3:::theirs/*"],
    }
    raw.put_bucket_policy(Bucket="theirs", Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
    with opened(ceph.endpoint, bucket="theirs") as owner:
        assert put(owner, keys_of(2)) == ["ok"] * 2
    reader = {"access_key_id": "reader", "secret_access_key": "secret-of-reader"}
    with opened(ceph.endpoint, bucket="theirs", **reader) as driver:
        assert get(driver, keys_of(3)) == ["ok", "ok", "missing"]
        assert put(driver, [make_key("new")]) == ["read_only"]
        with pytest.raises(StorageError, match="s3:DeleteObject"):
            driver.delete(keys_of(1))
    stranger = {"access_key_id": "stranger", "secret_access_key": "secret-of-stranger"}
    with pytest.raises(StorageError, match="s3:ListBucket"), opened(ceph.endpoint, bucket="theirs", **stranger):
        pass
    wrong = opened(ceph.endpoint, secret_access_key="wrong-one")
    with pytest.raises(StorageError, match="SignatureDoesNotMatch"), wrong:
        pass


def test_killed_and_frozen(ceph: Radosgw, tmp_path: Path) -> None:
    """Last: the gateway is another one afterwards."""
    hasty = {"connect_timeout": "1s", "read_timeout": "1s", "deadline": "4s"}
    with opened(ceph.endpoint, prefix=prefix_of(tmp_path), **hasty) as driver:
        assert put(driver, keys_of(4)) == ["ok"] * 4
        ceph.gateway.freeze()
        assert get(driver, keys_of(4)) == ["timeout"] * 4
        ceph.gateway.thaw()
        assert get(driver, keys_of(4)) == ["ok"] * 4
        ceph.gateway.kill()
        assert get(driver, keys_of(4)) == ["io"] * 4
        ceph.gateway.start()
        assert get(driver, keys_of(5)) == ["ok"] * 4 + ["missing"]
