"""The suite of observers over kvcore-prefetch."""

from kvcore.testing import ObserverConformance, context
from kvcore_prefetch.config import PrefetchConfig
from kvcore_prefetch.observer import PrefetchObserver


class TestPrefetch(ObserverConformance):
    def make_observer(self) -> PrefetchObserver:
        return PrefetchObserver(PrefetchConfig(), context())
