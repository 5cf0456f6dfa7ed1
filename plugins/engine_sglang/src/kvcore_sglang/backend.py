"""The storage backend that SGLang's HiCache loads:

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name":"kvcore","module_path":"kvcore_sglang.backend","class_name":"KVCoreHiCache","interface_v1":1,
"config":"kvcore.yaml"}'

SGLang calls it from three threads at once (queries, loads, stores), and from its scheduler to set up, to ask for
numbers and to close. Whatever a data method raised would cost older releases the thread that called it: none does.
"""

import logging
from collections.abc import Sequence
from typing import Any

from kvcore.api import LayoutError
from kvcore.service import open_store
from kvcore_sglang import _compat
from kvcore_sglang.faults import Guarded, guarded
from kvcore_sglang.hits import Held, restorable
from kvcore_sglang.identity import Eras, pool_spec, running_model
from kvcore_sglang.options import parse_options
from kvcore_sglang.pages import Lent, pages_of, tensor_memory
from kvcore_sglang.pools import LogicalPool, Pool, StoredPool
from kvcore_sglang.prompts import KEYS
from kvcore_sglang.stats import Exporter, Transfers

logger = logging.getLogger("kvcore.sglang")


def _all_false(keys: Any) -> list[bool]:
    return [False] * len(keys)


class KVCoreHiCache(_compat.storage_class(), Guarded):  # type: ignore[misc]
    """SGLang's third level of cache, in kvcore's tiers or at a kvcore server.

    One object is one page of one pool on one rank (on all ranks, where SGLang keeps the same on all). Nothing is
    evicted here: tiers do that by themselves. A tier or a server that is down is a miss; a wrong configuration is
    refused at the start.
    """

    _eras = Eras()
    """Of the process: SGLang may detach its backend and attach another, which must not find what was cleared."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        _compat.share_log()
        Guarded.__init__(self)
        self._config = storage_config
        self._options = parse_options(storage_config.extra_config or {})
        self._model = running_model()
        self._page_tokens = 0
        self._kv: Pool = LogicalPool()
        self._pools: dict[str, Pool] = {}
        self._registered: dict[str, Any] = {}
        self._transfers = Transfers()
        rank = f"tp{storage_config.tp_rank}.pp{storage_config.pp_rank}"
        self._store = open_store(self._options.config, flags=self._options.flags, name=f"sglang.{rank}")
        labels = {"tp_rank": str(storage_config.tp_rank), "pp_rank": str(storage_config.pp_rank)}
        told = storage_config.enable_storage_metrics
        self._exporter = Exporter(self._numbers, labels, lambda error: self.fault("metrics", error)) if told else None

    # -- setting up (on SGLang's scheduler) --------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the model's KV. Raises `LayoutError` when its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._page_tokens = int(mem_pool_host.page_size)
        try:
            self._kv = self._pool(_compat.KV, mem_pool_host)
        except BaseException:
            self._store.close()
            raise

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Any pool, KV included; also while requests run. One that cannot be stored is never found, and so are prefixes
        that need it."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != _compat.KV:
            try:
                self._pools[name] = self._pool(name, host_pool)
            except Exception as error:
                self.fault("register_mem_host_pool_v2", error)

    def _pool(self, name: str, pool: Any) -> Pool:
        self._registered[name] = pool
        if _compat.is_logical(pool):
            return LogicalPool()
        in_place = self._options.zero_copy or name != _compat.KV
        pages = pages_of(pool, in_place=in_place)
        if in_place and pages.path == "flat":
            logger.info("SGLang's pool %s does not say where its pages lie: they are copied", name)
        spec = pool_spec(self._model, self._config, name, pool, pages, self._page_tokens, self._eras.now)
        space = self._store.register(spec, KEYS, self._options.tenant)
        return StoredPool(pool, pages, self._store, space, self._moved)

    # -- KV, page by page in SGLang's own memory (`interface_v1`) -----------------------------------------------------

    @guarded(lambda keys: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages of the front are there. SGLang does not say whose."""
        return self._kv.prefix(keys, _compat.pages_before(extra_info))

    @guarded(_all_false)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool. Nothing is written there after this has returned."""
        return self._kv.load(keys, host_indices)

    @guarded(_all_false)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool."""
        return self._kv.save(keys, host_indices)

    # -- KV, as tensors that SGLang copies -----------------------------------------------------------------------------

    @guarded(lambda key: False)
    def exists(self, key: str) -> bool:
        """Is this page there?"""
        return self._kv.exists([key])[0]

    @guarded(lambda key: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page, loaded into `target_location`; None when it is not there."""
        return self.batch_get([key], [target_location])[0]

    @guarded(lambda keys: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The pages, each loaded into its tensor of `target_locations`; None for those that are not there."""
        arrived = self._kv.fill(keys, _lent(target_locations))
        return [target if there else None for target, there in zip(target_locations, arrived, strict=True)]

    @guarded(lambda key: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page."""
        return bool(self.batch_set([key], [value]))

    @guarded(lambda keys: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; are all of them stored?"""
        return all(self._kv.keep(keys, _lent([value.contiguous() for value in values])))

    # -- KV and side pools: windows, states, indexers, drafts ----------------------------------------------------------

    @guarded(lambda keys: _compat.pages_result(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Which prefixes are there, with what each pool needs of them."""
        kv_pages = self._kv.prefix(keys, _compat.pages_before(extra_info))
        front = keys[:kv_pages]
        held = []
        for transfer in pool_transfers or [] if front else []:
            trailing = _compat.trailing_pages(transfer)
            if trailing is not None:
                pool = self._pools.get(str(transfer.name))
                pages = pool.exists(front) if pool is not None else _all_false(front)
                held.append(Held(transfer.name, pages, trailing or None))
        found = restorable(kv_pages, held)
        by_pool = {_compat.KV: kv_pages, **found.by_pool} if kv_pages else {}
        return _compat.pages_result(max(found.lengths, default=0), by_pool, found.lengths)

    @guarded(lambda transfers: {t.name: _all_false(t.keys or []) for t in transfers})
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages into their pools."""
        return {t.name: pool.load(keys, t.host_indices) for t, pool, keys in self._targets(transfers)}

    @guarded(lambda transfers: {t.name: _all_false(t.keys or []) for t in transfers})
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of their pools."""
        return {t.name: pool.save(keys, t.host_indices) for t, pool, keys in self._targets(transfers)}

    def _targets(self, transfers: Sequence[Any]) -> list[tuple[Any, Pool, list[str]]]:
        found = []
        for transfer in transfers:
            name = str(transfer.name)
            pool = self._kv if name == _compat.KV else self._pools.get(name)
            if pool is None:
                raise LayoutError(f"SGLang's pool {name} is not registered")
            found.append((transfer, pool, transfer.keys or []))
        return found

    # -- the rest ------------------------------------------------------------------------------------------------------

    @guarded(lambda nothing: None)
    def clear(self) -> None:
        """Use nothing again of what was stored so far. It stays in the tiers until they evict it, for other engines."""
        self._eras.begin()
        pools = {name: self._pool(name, pool) for name, pool in self._registered.items()}
        self._kv = pools.pop(_compat.KV, self._kv)
        self._pools = pools

    def get_stats(self) -> Any:
        """What was moved since the last call. SGLang asks in every step of its scheduler."""
        return self._transfers.take()

    @guarded(lambda nothing: None)
    def close(self) -> None:
        """Close the store. Whatever is asked afterwards is a miss."""
        self._store.close()

    def _moved(self, loaded: bool, pages: int, nbytes: int, seconds: float) -> None:
        if self._exporter is not None:
            if pages:
                self._transfers.add(loaded, pages, nbytes, seconds)
            self._exporter.update()

    def _numbers(self) -> dict[str, float]:
        faults = {f'kvcore_faults_total{{where="{where}"}}': float(count) for where, count in self.faults.items()}
        return {**self._store.stats(), **faults}


def _lent(tensors: Any) -> Lent:
    return Lent([[tensor_memory(tensor)] for tensor in tensors], tensors)
