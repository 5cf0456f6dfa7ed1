"""The suite of observers over kvcore-otel: with a collector, and where nobody listens."""

import pytest

from kvcore.testing import ObserverConformance, context
from kvcore.testing.servers import free_port
from kvcore_otel.config import OtelConfig
from kvcore_otel.observer import OtelObserver
from otel_collector import Collector


class TestWithACollector(ObserverConformance):
    @pytest.fixture(autouse=True)
    def use(self, collector: Collector) -> None:
        self.endpoint = collector.http

    def make_observer(self) -> OtelObserver:
        return OtelObserver(OtelConfig(endpoint=self.endpoint), context())


class TestWithout(ObserverConformance):
    def make_observer(self) -> OtelObserver:
        return OtelObserver(OtelConfig(endpoint=f"http://127.0.0.1:{free_port()}"), context())
