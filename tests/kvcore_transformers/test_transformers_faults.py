"""No fault of the cache fails a call or changes a token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_small import FLAGS, cached, gqa, plain, tokens, yaml

from kvcore.api import LeaseError
from kvcore.engine import CacheEngine
from kvcore_transformers import PrefixCache, copies


def test_what_is_corrupt_on_disk_is_computed(tmp_path: Path) -> None:
    config = yaml(tmp_path, f"[{{storage: {{plugin: disk, path: {tmp_path}/disk}}}}]")
    expected = plain(gqa(), tokens(160))
    with PrefixCache(gqa(), config) as cache:
        cached(cache, tokens(160))
        assert cache.drain() == 0
    files = sorted(f for f in (tmp_path / "disk").rglob("*") if f.is_file() and f.stat().st_size > 4096)
    assert len(files) == 5
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    with PrefixCache(gqa(), config) as cache:
        for reused in (0, 159):
            assert torch.equal(cached(cache, tokens(160)), expected)
            assert (cache.last.reused_tokens, cache.last.refused) == (reused, "")


@pytest.mark.parametrize(
    "fault", ["error_rate: 1.0", "fail_rate: 1.0", "hang_rate: 1.0", "lost_rate: 1.0", "torn_rate: 1.0"]
)
def test_a_store_that_fails(tmp_path: Path, fault: str) -> None:
    inner = f"{{plugin: disk, path: {tmp_path}/disk}}"
    config = yaml(tmp_path, f"[{{storage: {{plugin: faulty, storage: {inner}, {fault}}}, timeout: 500ms}}]", wait="1s")
    expected = plain(gqa(), tokens(100))
    for _ in range(2):
        with PrefixCache(gqa(), config) as cache:
            assert torch.equal(cached(cache, tokens(100)), expected)
            assert cache.last.reused_tokens == 0


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    config = yaml(tmp_path, "[{storage: {plugin: redis, url: 'redis://127.0.0.1:1'}}]")
    with PrefixCache(gqa(), config) as cache:
        expected = plain(cache.model, tokens(100))
        for reused in (0, 96):  # L1 serves
            assert torch.equal(cached(cache, tokens(100)), expected)
            assert cache.last.reused_tokens == reused


def failing(error: Exception) -> Any:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (CacheEngine, "lookup", RuntimeError("lookup")),
        (CacheEngine, "retrieve", RuntimeError("retrieve")),
        (CacheEngine, "retrieve", LeaseError("gone")),
        (copies, "load", RuntimeError("copy")),
        (copies, "zero_padding", MemoryError()),
        (copies, "probe", RuntimeError("probe")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_error_while_loading(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    with PrefixCache(gqa(), flags=FLAGS) as cache:
        expected = plain(cache.model, tokens(100))
        if name != "probe":
            cached(cache, tokens(100))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(error))
            assert torch.equal(cached(cache, tokens(100)), expected)
            assert cache.last.reused_tokens == 0
            assert cache.engine.stats()["kvcore_leases"] == 0
        for _ in range(2):
            assert torch.equal(cached(cache, tokens(100)), expected)
        assert cache.last.reused_tokens == 96


def test_a_row_that_has_no_hashes_leaves_no_lease_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixCache(gqa(), flags=FLAGS) as cache:
        cached(cache, tokens(100))
        both = torch.cat([tokens(100), -tokens(100)])  # no vocabulary has these
        assert _length(cache.load(both)) == 0
        assert "loading failed" in cache.last.refused
        assert cache.engine.stats()["kvcore_leases"] == 0
        assert _length(cache.load(tokens(100))) == 96


def _length(past: Any) -> int:
    return int(past.get_seq_length())


@pytest.mark.parametrize(
    ("owner", "name"), [(CacheEngine, "reserve"), (copies, "store"), (CacheEngine, "publish")], ids=str
)
def test_an_error_while_storing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    with PrefixCache(gqa(), flags=FLAGS) as cache:
        expected = plain(cache.model, tokens(100))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(RuntimeError(name)))
            assert torch.equal(cached(cache, tokens(100)), expected)
            assert "storing failed: RuntimeError" in cache.last.refused
        assert torch.equal(cached(cache, tokens(100)), expected)
        assert cache.last.reused_tokens == 0, "nothing half done was published"


def test_what_vanishes_while_it_is_copied_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixCache(gqa(), flags=FLAGS) as cache:
        expected = plain(cache.model, tokens(160))
        cached(cache, tokens(160))
        load = copies.PagedCache.load
        monkeypatch.setattr(copies.PagedCache, "load", lambda paged, plan: load(paged, plan) or {5, 6})
        assert torch.equal(cached(cache, tokens(160)), expected)
        assert cache.last.reused_tokens == 80, "the five blocks before it are good"


def test_an_error_of_the_model_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixCache(gqa(), flags=FLAGS) as cache:
        with pytest.raises(ValueError, match="nonsense"):
            cached(cache, tokens(40), nonsense=1)
        cached(cache, tokens(100))
        cached(cache, tokens(100))
        assert cache.last.reused_tokens == 96


def test_l1_that_is_too_small() -> None:
    flags = {**FLAGS, "l1.size": "1MiB"}
    with PrefixCache(gqa(), flags=flags) as cache:
        for seed in range(3):
            assert torch.equal(cached(cache, tokens(600, seed)), plain(cache.model, tokens(600, seed)))
        assert cache.last.refused == ""


def test_a_closed_cache_is_only_misses() -> None:
    cache = PrefixCache(gqa(), flags=FLAGS)
    cached(cache, tokens(100))
    cache.close()
    cache.close()
    assert torch.equal(cached(cache, tokens(100)), plain(cache.model, tokens(100)))
    assert cache.last.reused_tokens == 0
