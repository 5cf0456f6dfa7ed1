"""The aesgcm serde: the conformance suite, keys, and everything that somebody with write access might do to a store."""

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from docs_blocks import lines
from kvcore.api import ConfigError, Context, FrameError, ObjectKey, ObjectLayout, Serde, SerdeError, SerdeUnavailable
from kvcore.l2 import HEADER_BYTES, Codec, frame
from kvcore.l2.frame import Stage
from kvcore.testing import SerdeConformance
from kvcore_aesgcm.config import AesGcmConfig
from kvcore_aesgcm.serde import PIECE_BYTES, AesGcmSerde

LAYOUT = ObjectLayout(4, 1, (512, 512), "bfloat16", 2)
DATA = secrets.token_bytes(LAYOUT.nbytes)
KEY, OTHER = ObjectKey(b"n" * 16, b"h" * 32, 0), ObjectKey(b"n" * 16, b"i" * 32, 0)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in (1, 2):
        monkeypatch.setenv(f"KV_AT_REST_{i}", f"{i:064x}")


def serde(*ids: int, key: int | None = None) -> AesGcmSerde:
    keys = {f"k{i}": f"env:KV_AT_REST_{i}" for i in ids}
    return AesGcmSerde(AesGcmConfig(keys=keys, key=key and f"k{key}"), Context())


class TestConformance(SerdeConformance):
    # Written with key 1 and the nonce 0, bound to nothing.
    written_before = (
        (
            bytes.fromhex("4b41026b3100000000000000000000000032e10ec0ba070120e8ac64decb17d942176c1f5549ec"),
            b"kvcore",
            LAYOUT,
        ),
    )

    def make_serde(self) -> Serde:
        return serde(1)

    def make_other_serdes(self) -> list[Serde]:
        return [serde(1, 2, key=1)]


def frame_of(chain: list[Serde], key: ObjectKey = KEY, data: bytes = DATA) -> tuple[memoryview, memoryview]:
    header = memoryview(bytearray(HEADER_BYTES))
    (body,) = Codec(chain, lambda tag: None).encode(key, (memoryview(data),), LAYOUT, header)
    return header, body


def read(chain: list[Serde], header: memoryview, body: memoryview, key: ObjectKey = KEY) -> bytes:
    into = memoryview(bytearray(LAYOUT.nbytes))
    Codec(chain, lambda tag: None).decode(key, header, (body,), HEADER_BYTES + len(body), (into,), LAYOUT)
    return bytes(into)


def refused(chain: list[Serde], header: memoryview, body: memoryview, key: ObjectKey = KEY) -> str:
    with pytest.raises(FrameError) as caught:
        read(chain, header, body, key)
    return caught.value.reason


def forged(body: bytes, stages: list[Stage], key: ObjectKey = KEY) -> memoryview:
    """A header that is right in all that needs no key."""
    header = memoryview(bytearray(HEADER_BYTES))
    frame.pack(key, len(body), stages, frame.checksum(memoryview(body)), header)
    return header


@pytest.mark.parametrize(
    "nbytes", [0, 1, 15, 16, 17, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]
)
def test_it_is_aes_gcm_and_nothing_else(nbytes: int) -> None:
    """Read by the library's other interface to it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data = secrets.token_bytes(nbytes)
    encoded = bytes(serde(1).bound(b"to").encode(memoryview(data), LAYOUT))
    header, nonce, sealed = encoded[:17], encoded[5:17], encoded[17:]
    assert AESGCM(bytes.fromhex(f"{1:064x}")).decrypt(nonce, sealed, header + b"to") == data


def test_no_two_encodings_are_alike() -> None:
    assert len({bytes(serde(1).encode(memoryview(DATA), LAYOUT)) for _ in range(50)}) == 50


def test_nothing_plain_is_stored_though_it_gets_longer() -> None:
    header, body = frame_of([serde(1)], data=bytes(LAYOUT.nbytes))
    assert len(body) > LAYOUT.nbytes
    assert bytes(64) not in bytes(body)
    assert read([serde(1)], header, body) == bytes(LAYOUT.nbytes)


def test_key_rotation() -> None:
    old = frame_of([serde(1)])
    new = frame_of([serde(1, 2, key=2)])
    assert read([serde(1, 2, key=2)], *old) == DATA
    assert read([serde(1, 2, key=1)], *new) == DATA
    assert refused([serde(2)], *old) == "unknown_serde", "a miss that stays: others have the key"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_changed_is_refused(data: Any) -> None:
    os.environ["KV_AT_REST_1"] = f"{1:064x}"
    _, body = frame_of([serde(1)])
    damaged = bytearray(body)
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    header = forged(damaged, [Stage("aesgcm/1", LAYOUT.nbytes)])
    reasons = ("serde", "unknown_serde") if 2 <= at < 5 else ("serde",)  # the key's id
    assert refused([serde(1)], header, memoryview(damaged)) in reasons


def test_an_object_under_another_name_is_refused() -> None:
    """Its header can be forged, and its checksum: neither needs a key."""
    _, body = frame_of([serde(1)], OTHER)
    stages = [Stage("aesgcm/1", LAYOUT.nbytes)]
    assert read([serde(1)], forged(body, stages, OTHER), body, OTHER) == DATA
    assert refused([serde(1)], forged(body, stages), body) == "serde"


def test_a_plain_object_is_refused() -> None:
    assert refused([serde(1)], forged(DATA, []), memoryview(DATA)) == "unsealed"


class Flip(Serde):
    """As long as what it encodes, so that only the signature can tell that it was left out or put in."""

    tag = "flip/1"

    def encode(self, source: memoryview, layout: ObjectLayout) -> bytes:
        return bytes(b ^ 255 for b in source)

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        into[:] = self.encode(source, layout)

    def max_encoded_bytes(self, nbytes: int) -> int:
        return nbytes


def test_the_chain_is_signed() -> None:
    flip, nbytes = Flip(None, None), LAYOUT.nbytes
    chain: list[Serde] = [flip, serde(1)]
    header, body = frame_of(chain)
    assert read(chain, header, body) == DATA
    assert refused(chain, forged(body, [Stage("aesgcm/1", nbytes)]), body) == "serde"
    _, alone = frame_of([serde(1)])
    assert refused(chain, forged(alone, [Stage("flip/1", nbytes), Stage("aesgcm/1", nbytes)]), alone) == "serde"


def test_behind_zstd() -> None:
    from kvcore_zstd.config import ZstdConfig
    from kvcore_zstd.serde import ZstdSerde

    chain: list[Serde] = [ZstdSerde(ZstdConfig(), Context()), serde(1)]
    header, body = frame_of(chain, data=bytes(LAYOUT.nbytes))
    assert len(body) < LAYOUT.nbytes // 4
    assert read(chain, header, body) == bytes(LAYOUT.nbytes)


def test_the_key_is_missed_before_anything_is_written() -> None:
    encoded = serde(1).encode(memoryview(DATA), LAYOUT)
    into = bytearray(len(DATA))
    with pytest.raises(SerdeUnavailable, match="key 'k1'; configured are k2"):
        serde(2).decode(encoded, memoryview(into), LAYOUT)
    assert not any(into)


def test_another_key_under_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = serde(1).encode(memoryview(DATA), LAYOUT)
    monkeypatch.setenv("KV_AT_REST_1", secrets.token_hex(32))
    with pytest.raises(SerdeError, match="changed since"):
        serde(1).decode(encoded, memoryview(bytearray(len(DATA))), LAYOUT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": {}}, "at least 1"),
        ({"keys": {"a b": "env:X"}}, "the id of key 1 is none"),
        ({"keys": {"f" * 64: "env:X"}}, "the id of key 1 is none"),
        ({"keys": {"k": "env:" + "f" * 64}}, "write env:NAME or file:PATH"),
        ({"keys": {"k": "0" * 64}}, "write env:NAME or file:PATH"),
        ({"keys": {"k": "env:KVCORE_KEY"}}, "options of kvcore; name it otherwise"),
        ({"keys": {"a": "env:X", "b": "env:Y"}}, "name the one of a, b that encrypts"),
        ({"keys": {"a": "env:X"}, "key": "b"}, "is not the id of one of the keys, which are a"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AesGcmConfig(**options)


def test_keys_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(source: str) -> str:
        with pytest.raises(ConfigError) as caught:
            AesGcmSerde(AesGcmConfig(keys={"k": source}), Context())
        return str(caught.value)

    assert "the environment variable NOT_SET is not set" in fault("env:NOT_SET")
    assert "cannot be read (No such file or directory)" in fault(f"file:{tmp_path}/none")
    secret = secrets.token_hex(31)
    (tmp_path / "short").write_text(secret)
    text = fault(f"file:{tmp_path}/short")
    assert "holds 62 characters; 64 hexadecimal digits are needed" in text
    assert secret not in text
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "holds" in fault(f"file:{tmp_path}/binary")
    (tmp_path / "good").write_text(secrets.token_hex(32).upper() + "\n")
    AesGcmSerde(AesGcmConfig(keys={"k": f"file:{tmp_path}/good"}), Context())


def test_what_is_no_file_of_a_key_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    for name, said in (("fifo", "not a regular file"), ("huge", "64 hexadecimal"), ("", "not a regular file")):
        with pytest.raises(ConfigError, match=said):
            AesGcmSerde(AesGcmConfig(keys={"k": f"file:{tmp_path}/{name}"}), Context())


def test_a_refused_object_leaves_nothing_of_itself() -> None:
    encoded = serde(1).bound(b"one").encode(memoryview(DATA), LAYOUT)
    into = bytearray(len(DATA))
    with pytest.raises(SerdeError):
        serde(1).bound(b"other").decode(encoded, memoryview(into), LAYOUT)
    assert not any(into)


@pytest.mark.parametrize(
    "options",
    ["key: SECRET, keys: {a: 'env:X'}", "keys: SECRET", "keys: {SECRET: 'env:X'}", "keys: {a: 'env:SECRET'}",
     "keyz: SECRET", "keys: {a: SECRET}", "keys: {a: 'env:X', b: [SECRET]}"],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_not_repeated(options: str, tmp_path: Path) -> None:
    from kvcore.config import load_config
    from kvcore.plugins import Registry

    secret = secrets.token_hex(32)
    config = tmp_path / "kvcore.yaml"
    config.write_text(f"l2: [{{storage: memory, serde: [{{plugin: aesgcm, {options.replace('SECRET', secret)}}}]}}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(config), registry=Registry())
    assert secret not in str(caught.value)


def test_a_key_as_the_readme_makes_it(tmp_path: Path) -> None:
    """plugins/serde_aesgcm/README.md"""
    (line,) = lines("plugins/serde_aesgcm/README.md", "openssl")
    subprocess.run(["sh", "-c", line.replace("/etc/kvcore", str(tmp_path))], check=True, timeout=60)
    assert (tmp_path / "key-1").stat().st_mode & 0o777 == 0o600
    made = AesGcmSerde(AesGcmConfig(keys={"k1": f"file:{tmp_path}/key-1"}), Context())
    assert read([made], *frame_of([made])) == DATA
