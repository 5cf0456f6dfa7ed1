"""Pages through the real host pools, controller and factory of SGLang. Run by `scenarios.py`."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from caches import PAGE, cache, disk, prompt

PAGES = 7


def round_trips(model: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each way of keeping pages: what one cache has computed another finds, in other slots of its device."""
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            options = {"kvcore.l2": disk(Path(folder))}
            tokens = prompt(1, PAGES)
            with cache(model, options, **case) as first:
                wanted = first.compute(tokens)
                kind = (first.tree.cache_controller.page_get_func.__name__, first.backend._kv.pages.path)
                ranges = len(first.backend._kv.pages.sizes)
                stored = first.backend._store.stats()
                faults = dict(first.backend.faults)
            with cache(model, options, **case) as second:
                second.slots.alloc(3 * PAGE)
                found = second.fetch(tokens)
                faults |= second.backend.faults
                loaded = second.backend._store.stats()
        results.append(
            {
                "same": found is not None and all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)),
                "buffers": len(wanted),
                "kind": kind,
                "ranges": ranges,
                "stored": stored['kvcore_tier_operations_total{tier="disk",op="store",outcome="ok"}'],
                "loaded": loaded['kvcore_tier_operations_total{tier="disk",op="load",outcome="ok"}'],
                "faults": faults,
            }
        )
    return results


def side_pools(model: Path) -> dict[str, Any]:
    """A second pool, of windows, beside KV."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool

    with tempfile.TemporaryDirectory() as folder, cache(model, {"kvcore.l2": disk(Path(folder))}) as one:
        backend, kv = one.backend, one.tree.cache_controller.storage_host_pool
        swa = build_kv_host_pool(kv_pool=one.device, page_size=PAGE, use_mla=False, pool_label="swa")
        backend.register_mem_host_pool_v2(swa, PoolName.SWA)
        keys = [f"{i:064x}" for i in range(6)]
        slots, windows = kv.alloc(6 * PAGE), swa.alloc(6 * PAGE)
        kv.kv_buffer.normal_()
        swa.kv_buffer.normal_()
        wanted = [swa.get_data_page(windows[i * PAGE]).clone() for i in range(6)]

        def transfer(first: int, last: int, at: int = 0, **kwargs: Any) -> PoolTransfer:
            count = last - first
            return PoolTransfer(
                name=PoolName.SWA,
                host_indices=windows[at * PAGE : (at + count) * PAGE],
                keys=keys[first:last],
                **kwargs,
            )

        def exists(**kwargs: Any) -> list[Any]:
            found = backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA, **kwargs)])
            hits = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
            return [found.kv_hit_pages, found.restorable_prefix_pages, hits]

        result: dict[str, Any] = {
            "stored": [
                backend.batch_set_v1(keys, slots),
                backend.batch_set_v2([transfer(2, 5, 2)])[PoolName.SWA],
            ],
            "trailing": exists(keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            "all": exists(hit_policy=PoolHitPolicy.ALL_PAGES),
        }
        swa.kv_buffer.zero_()
        result["loaded"] = backend.batch_get_v2([transfer(2, 6)])[PoolName.SWA]
        result["same"] = all(torch.equal(swa.get_data_page(windows[i * PAGE]), wanted[i + 2]) for i in range(3))
        short = PoolTransfer(name=PoolName.SWA, host_indices=windows[:PAGE], keys=keys[:3])
        result["wrong_length"] = backend.batch_get_v2([short])[PoolName.SWA]
        stranger = PoolTransfer(name=PoolName.MAMBA, host_indices=windows[:PAGE], keys=keys[:3])
        result["unknown"] = backend.batch_get_v2([stranger])[PoolName.MAMBA]
        result["faults"] = dict(backend.faults)
    return result


def spaces(model: Path) -> dict[str, str]:
    """The namespace of the same model, kept in several ways."""
    found: dict[str, str] = {}

    def note(name: str, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            given = {"kvcore.l2": disk(Path(folder)), **(options or {})}
            with cache(model, given, **kwargs) as one:
                found[name] = one.backend._kv._space.namespaces[0].hex()
                if name == "last":
                    found.update(changed(one.backend))

    note("page_first")
    note("again")
    note("layer_first", layout="layer_first")
    note("flat", in_place=False)
    note("mla", mla=True)
    note("tenant", {"tenant": "blue"})
    note("last")
    note("attached anew")
    return found


def changed(backend: Any) -> dict[str, str]:
    """Of one backend, with other ranks, and after `clear`."""
    config = backend._config
    found = {}
    for field, value in (("tp_rank", 1), ("tp_size", 2), ("pp_rank", 1), ("attn_cp_size", 2)):
        before = getattr(config, field)
        setattr(config, field, value)
        found[f"{field}={value}"] = backend._pool("kv", backend.mem_pool_host)._space.namespaces[0].hex()
        setattr(config, field, before)
    found["draft pool"] = backend._pool("draft", backend.mem_pool_host)._space.namespaces[0].hex()
    backend.clear()
    found["cleared"] = backend._kv._space.namespaces[0].hex()
    return found


def faults(model: Path) -> dict[str, Any]:
    """What SGLang is answered when kvcore itself fails."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name} fails")

    with tempfile.TemporaryDirectory() as folder, cache(model, {"kvcore.l2": disk(Path(folder))}) as one:
        backend, pool = one.backend, one.tree.cache_controller.storage_host_pool
        slots = pool.alloc(2 * PAGE)
        keys, key = ["a" * 64, "b" * 64], "a" * 64
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        transfers = [PoolTransfer(name=PoolName.KV, host_indices=slots, keys=keys)]
        whole, backend._kv = backend._kv, Broken()
        answers = {
            "batch_exists": backend.batch_exists(keys),
            "batch_get_v1": backend.batch_get_v1(keys, slots),
            "batch_set_v1": backend.batch_set_v1(keys, slots),
            "batch_get": backend.batch_get(keys, pages),
            "batch_set": backend.batch_set(keys, pages),
            "exists": backend.exists(key),
            "get": backend.get(key, pages[0]),
            "set": backend.set(key, pages[0]),
            "batch_exists_v2": backend.batch_exists_v2(keys, transfers).kv_hit_pages,
            "batch_get_v2": {str(k): v for k, v in backend.batch_get_v2(transfers).items()},
            "batch_set_v2": {str(k): v for k, v in backend.batch_set_v2(transfers).items()},
        }
        backend._kv = whole
        return {"answers": answers, "counted": dict(backend.faults)}


def late(model: Path) -> dict[str, Any]:
    """A storage that answers after its time-out."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tokens = prompt(1, 4)
        with cache(model, {"kvcore.l2": disk(place)}) as one:
            one.compute(tokens)
        (tier,) = disk(place)
        slow = {"plugin": "faulty", "storage": tier["storage"], "latency": "2s", "operations": ["load"]}
        with cache(model, {"kvcore.l2": [{"storage": slow, "timeout": "200ms"}]}) as one:
            from sglang.srt.mem_cache.utils import get_hash_str

            pool = one.tree.cache_controller.storage_host_pool
            slots = pool.alloc(4 * PAGE)
            keys = get_hash_str(tokens, None, PAGE)
            there = one.backend.batch_exists(keys)
            arrived = one.backend.batch_get_v1(keys, slots)
            pool.kv_buffer.fill_(7)
            time.sleep(3)  # what is proved is that nothing happens in this time
            return {"there": there, "arrived": arrived, "untouched": bool((pool.kv_buffer == 7).all())}
