"""The spaces of LMCache's objects: one for each model, object group and layout."""

import logging
import threading
from typing import Any

from kvcore.api import KVCoreError
from kvcore.engine import StoreSpace
from kvcore_lmcache._compat import Layout
from kvcore_lmcache.keys import SCHEME, spec_of

logger = logging.getLogger("kvcore")

MAX_SPACES = 1024
"""More models, groups and layouts than this are not cached."""


class Spaces:
    """Registers a space when it is first asked for. Thread-safe; never raises."""

    def __init__(self, store: Any, weights: str, algorithm: str) -> None:
        self._store = store
        self._weights = weights
        self._algorithm = algorithm
        self._lock = threading.Lock()
        self._spaces: dict[tuple[str, int, int], dict[Layout, StoreSpace | None]] = {}
        self._stored: dict[tuple[str, int], Layout] = {}
        self._warned = False

    def of(self, model: str, group: int, ranks: int, layout: Layout) -> StoreSpace | None:
        """The space of objects of this layout; None when they cannot be cached."""
        with self._lock:
            known = self._spaces.setdefault((model, group, ranks), {})
            if layout not in known:
                full = sum(map(len, self._spaces.values())) >= MAX_SPACES
                known[layout] = None if full else self._register(model, group, ranks, layout)
            return known[layout]

    def all_of(self, model: str, group: int, ranks: int) -> list[tuple[Layout, StoreSpace]]:
        """The spaces known so far of a model's objects, whatever their layout."""
        with self._lock:
            known = self._spaces.get((model, group, ranks), {})
            return [(layout, space) for layout, space in known.items() if space is not None]

    def stores(self, model: str, group: int, layout: Layout) -> None:
        """Objects of this layout are stored."""
        self._stored[model, group] = layout

    def asks(self, model: str, group: int, layout: Layout) -> None:
        """Objects of this layout are looked up. Says it once when those that are stored are of another."""
        stored = self._stored.get((model, group))
        if stored is not None and stored != layout and not self._warned:
            self._warned = True
            logger.warning(
                "LMCache looks up objects of %s %s but stores objects of %s %s (model %s): they are not found. If the "
                "adapter has a `serde` in --l2-adapter, take it out and use `serde:` of kvcore's tiers instead",
                layout.dtypes, layout.shapes, stored.dtypes, stored.shapes, model,
            )  # fmt: skip

    def _register(self, model: str, group: int, ranks: int, layout: Layout) -> StoreSpace | None:
        try:
            spec = spec_of(model, group, layout, self._weights, ranks, self._algorithm)
            space: StoreSpace = self._store.register(spec, keys=SCHEME)
        except KVCoreError as e:
            logger.warning("objects of model %s, group %d are not cached: %s", model, group, e)
            return None
        return space
