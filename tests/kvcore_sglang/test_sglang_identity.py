"""With arguments as SGLang has them. Its own: tests/sglang."""

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.engine import weights_fingerprint
from kvcore_sglang import _compat
from kvcore_sglang.identity import Eras, page_hash, running_model


def arguments(**changes: Any) -> SimpleNamespace:
    names = (
        "revision", "lora_paths", "attention_backend", "prefill_attention_backend", "decode_attention_backend", "dtype",
        "kv_cache_dtype", "quantization", "quantization_param_path", "load_format", "json_model_override_args",
        "context_length", "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    )  # fmt: skip
    return SimpleNamespace(**{**dict.fromkeys(names), "model_path": "org/name", **changes})


def model(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(_compat, "server_args", lambda: arguments(**changes))
    return running_model()


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.bin").write_bytes(content)
    return folder


def test_a_checkpoint_is_known_by_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two = weights(tmp_path / "one", b"1" * 5000), weights(tmp_path / "two", b"2" * 5000)
    found = model(monkeypatch, model_path=str(one))
    assert (found.name, found.weights) == ("one", weights_fingerprint(str(one)))
    assert found.weights != model(monkeypatch, model_path=str(two)).weights


def test_what_changes_the_kv_changes_the_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adapter, other = weights(tmp_path / "a", b"1" * 5000), weights(tmp_path / "b", b"2" * 5000)

    def lora(path: Path) -> list[Any]:
        return [SimpleNamespace(lora_name="l", lora_path=str(path))]

    found = [
        model(monkeypatch),
        model(monkeypatch, attention_backend="triton"),
        model(monkeypatch, decode_attention_backend="triton", attention_backend="fa3"),
        model(monkeypatch, json_model_override_args='{"rope_theta": 1}'),
        model(monkeypatch, quantization="fp8"),
        model(monkeypatch, kv_cache_dtype="fp8_e4m3"),
        model(monkeypatch, speculative_draft_model_path="org/draft"),
        model(monkeypatch, lora_paths=lora(adapter)),
        model(monkeypatch, lora_paths=lora(other)),
    ]
    assert len({repr(one) for one in found}) == len(found)
    assert model(monkeypatch) == found[0]


def test_page_hashes() -> None:
    key = hashlib.sha256(b"page").hexdigest()
    assert page_hash(key) == hashlib.sha256(b"page").digest()
    others = ["", "page", key[:-2], key.upper(), key + "_k"]
    assert [page_hash(other) for other in others] == [hashlib.sha256(o.encode()).digest() for o in others]


def test_eras_of_one_launch_are_the_same_on_all_ranks() -> None:
    one, two = Eras(), Eras()
    assert one.now == ""
    seen = []
    for _ in range(2):
        one.begin()
        two.begin()
        assert one.now == two.now
        seen.append(one.now)
    assert len(set(seen)) == 2


def test_another_launch_has_other_eras(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Eras(), Eras()
    one.begin()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    two.begin()
    assert one.now != two.now
