"""The L2 adapter that LMCache's server loads. Its class is named in `--l2-adapter`, see the README."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvcore.engine import Asked, StoreSpace
from kvcore.service import open_store
from kvcore_lmcache import _compat
from kvcore_lmcache._compat import Layout, bitmap, buffer_of, layout_from, layout_of, ranks_of, store_result
from kvcore_lmcache.config import parse
from kvcore_lmcache.keys import hash_of
from kvcore_lmcache.lanes import Lane
from kvcore_lmcache.spaces import Spaces

logger = logging.getLogger("kvcore")

STORE_THREADS = 4
LOOKUP_THREADS = 4
LOAD_THREADS = 8
"""As many as LMCache loads for at once by default (`--l2-prefetch-max-in-flight`)."""
CLOSE_TIMEOUT_S = 30.0
"""For all lanes together. LMCache frees the memory that tasks work on when the adapter has closed."""

Batch = dict[StoreSpace, list[int]]
"""Space -> places in the task's list of keys."""


class KVCoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there when types are checked
    """kvcore's tiers behind LMCache's L1.

    Bytes go straight between LMCache's memory and the storages. No method but the constructor raises: what cannot be
    found or loaded is a miss, what cannot be stored is a failed task. kvcore's tiers keep to their capacity
    themselves, so there is no aggregate capacity for LMCache to evict by.

    LMCache locks what a lookup found until it is loaded. A kvcore tier cannot promise that; what has gone by then is a
    miss, which LMCache's loads allow for.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """`params` are the `adapter_params`. Raises `ConfigError` or `PluginError`."""
        super().__init__()
        options = parse(params)
        self._store = open_store(options.config, flags=options.set, name="lmcache")
        self._spaces = Spaces(self._store, options.weights, _compat.hash_algorithm())
        self._queue_size = options.queue_size
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._refused = 0
        self._closed = False
        self._stores: Lane[Any] = Lane("store", STORE_THREADS, _compat.notifier())
        self._lookups: Lane[Any] = Lane("lookup", LOOKUP_THREADS, _compat.notifier())
        self._loads: Lane[Any] = Lane("load", LOAD_THREADS, _compat.notifier())

    def get_store_event_fd(self) -> int:
        """Notified when a store task is done."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Notified when a lookup is done."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Notified when a load is done."""
        return self._loads.fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store the objects, unless more bytes wait than `queue_size`: then the task fails at once."""
        nbytes = sum(memory.get_size() for memory in objects)
        with self._lock:
            fits = self._waiting_bytes == 0 or self._waiting_bytes + nbytes <= self._queue_size
            if fits:
                self._waiting_bytes += nbytes
            else:
                self._refused += len(keys)
        if not fits:
            return self._stores.ended(store_result(False, 0))

        def work() -> Any:
            try:
                return self._store_now(keys, objects, nbytes)
            finally:
                with self._lock:
                    self._waiting_bytes -= nbytes

        return self._stores.submit(work, lambda: store_result(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """The store tasks that are done, each told once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Ask which objects any tier has."""
        none = lambda: bitmap([False] * len(keys))  # noqa: E731
        return self._lookups.submit(lambda: bitmap(self._lookup_now(keys, group_layout_descs)), none)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """What a lookup found, told once; None until then."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Bring the objects into LMCache's memory."""
        none = lambda: bitmap([False] * len(keys))  # noqa: E731
        return self._loads.submit(lambda: bitmap(self._load_now(keys, objects)), none)

    def query_load_result(self, task_id: int) -> Any:
        """Which objects have arrived, told once; None until then."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects. LMCache does not say their layout: those of models not seen since the start are left."""
        try:
            self._delete_now(keys)
        except Exception:
            logger.exception("%d objects could not be deleted for LMCache", len(keys))

    def report_status(self) -> dict[str, Any]:
        """For LMCache's `/status`. A tier that is down is not unhealthy: it means misses."""
        with self._lock:
            status = {
                "is_healthy": not self._closed,
                "type": type(self).__name__,
                "waiting_store_bytes": self._waiting_bytes,
                "refused_store_objects": self._refused,
            }
        try:
            status["stats"] = dict(self._store.stats())
        except Exception:
            logger.exception("the figures could not be had")
        return status

    def close(self) -> None:
        """End the tasks and close the tiers, in bounded time. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        lanes: tuple[Lane[Any], ...] = (self._lookups, self._loads, self._stores)
        ended = [lane.close(deadline - time.monotonic()) for lane in lanes]
        if not all(ended):
            logger.warning("tasks of LMCache still hang in a storage after %.0f s", CLOSE_TIMEOUT_S)
        self._store.close()

    # What the lanes' threads do.

    def _store_now(self, keys: list[Any], objects: list[Any], nbytes: int) -> Any:
        batches: Batch = {}
        for i, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            layout = layout_of(memory)
            self._spaces.stores(key.model_name, key.object_group_id, layout)
            self._add(batches, i, key, layout)
        buffers = [_view(memory) for memory in objects]
        done = self._each(batches, keys, buffers, self._store.store)
        stored = [i for i, yes in enumerate(done) if yes]
        if stored:
            self._tell(self._notify_keys_stored, [keys[i] for i in stored], [objects[i].get_size() for i in stored])
        return store_result(all(done), nbytes)

    def _lookup_now(self, keys: list[Any], descs: Mapping[int, Any]) -> list[bool]:
        layouts = {group: layout_from(desc) for group, desc in descs.items()}
        batches: Batch = {}
        for i, key in enumerate(keys):
            if (layout := layouts.get(key.object_group_id)) is not None:
                self._add(batches, i, key, layout)
                self._spaces.asks(key.model_name, key.object_group_id, layout)
            else:  # LMCache calls the layouts a hint: without it, those that were stored or loaded before
                for _, space in self._spaces.all_of(key.model_name, key.object_group_id, ranks_of(key)):
                    batches.setdefault(space, []).append(i)
        found = [False] * len(keys)
        for space, places in batches.items():
            rank = keys[places[0]].kv_rank
            mine = [i for i in places if keys[i].kv_rank == rank]
            # The chunks of one rank are a prompt, which is on record; those of the others are the same once more.
            for row, asked in ((mine, Asked()), ([i for i in places if keys[i].kv_rank != rank], None)):
                answers = self._store.exists(space, [hash_of(keys[i]) for i in row], asked=asked) if row else []
                for i, yes in zip(row, answers, strict=True):
                    found[i] = found[i] or yes
        hits = [key for key, yes in zip(keys, found, strict=True) if yes]
        if hits:
            self._tell(self._notify_keys_accessed, hits)
        return found

    def _load_now(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        batches: Batch = {}
        for i, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            self._add(batches, i, key, layout_of(memory))
        return self._each(batches, keys, [_view(memory) for memory in objects], self._store.load)

    def _delete_now(self, keys: list[Any]) -> None:
        gone: dict[int, int] = {}
        by_model: dict[tuple[str, int, int], list[int]] = {}
        for i, key in enumerate(keys):
            by_model.setdefault((key.model_name, key.object_group_id, ranks_of(key)), []).append(i)
        for kind, places in by_model.items():
            for layout, space in self._spaces.all_of(*kind):
                self._store.delete(space, [hash_of(keys[i]) for i in places])
                gone.update(dict.fromkeys(places, sum(layout.sizes)))
        if gone:
            self._tell(self._notify_keys_deleted, [keys[i] for i in gone], list(gone.values()))

    def _add(self, batches: Batch, place: int, key: Any, layout: Layout) -> None:
        space = self._spaces.of(key.model_name, key.object_group_id, ranks_of(key), layout)
        if space is not None:
            batches.setdefault(space, []).append(place)

    def _each(
        self,
        batches: Batch,
        keys: list[Any],
        buffers: list[memoryview | None],
        do: Callable[[StoreSpace, Sequence[bytes], Sequence[Sequence[memoryview]]], list[bool]],
    ) -> list[bool]:
        """Do it for each space's keys; which succeeded. An object that is not in host memory does not."""
        done = [False] * len(keys)
        for space, places in batches.items():
            usable = [(i, view) for i in places if (view := buffers[i]) is not None]
            answers = do(space, [hash_of(keys[i]) for i, _ in usable], [(view,) for _, view in usable])
            for (i, _), yes in zip(usable, answers, strict=True):
                done[i] = yes
        return done

    def _tell(self, notify: Callable[..., None], *what: Any) -> None:
        """Tell LMCache's listeners; a fault of theirs changes no result."""
        try:
            notify(*what)
        except Exception:
            logger.exception("LMCache's listeners failed")


def _view(memory: Any) -> memoryview | None:
    try:
        return buffer_of(memory)
    except (TypeError, NotImplementedError, ValueError) as e:
        logger.warning("an object of LMCache cannot be stored or loaded: %s", e)
        return None
