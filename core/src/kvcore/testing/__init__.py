"""The kit of plugin authors. Conformance suites: subclass one, give a factory, and know that your component keeps the
contract.

    from kvcore.testing import StorageConformance, context

    class TestAcmeStorage(StorageConformance):
        def make_storage(self, tmp_path):
            return AcmeStorage(AcmeConfig(path=tmp_path), context())

They need `kvcore[testing]` (pytest and hypothesis) and nothing of the core but `kvcore.api`. kvcore's own built-ins and
plugins pass the same suites.

Beside them: `context` gives what a constructor takes beside its config, `faulty` and `Faults` make any storage fail on
purpose, `dist` and `installed` fake what is installed, and `kvcore.testing.servers` runs real servers.

The promise: a patch release of kvcore never adds a test that a correct component of the same API version could fail.
New mandatory tests come only in minor versions and stand in the changelog; a new capability comes with a flag that is
off by default. A test that has nothing to say about a component is skipped with its reason (`pytest -rs`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.testing.contexts import context
    from kvcore.testing.distributions import dist, installed
    from kvcore.testing.eviction import EvictionConformance
    from kvcore.testing.fault_config import Faults
    from kvcore.testing.faults import faulty
    from kvcore.testing.keys import KeyGeneratorConformance
    from kvcore.testing.memory import aligned
    from kvcore.testing.observer import ObserverConformance
    from kvcore.testing.serde import SerdeConformance
    from kvcore.testing.storage import StorageConformance

__all__ = [
    "EvictionConformance",
    "Faults",
    "KeyGeneratorConformance",
    "ObserverConformance",
    "SerdeConformance",
    "StorageConformance",
    "aligned",
    "context",
    "dist",
    "faulty",
    "installed",
]

_HOMES = {
    "EvictionConformance": "eviction",
    "Faults": "fault_config",
    "KeyGeneratorConformance": "keys",
    "ObserverConformance": "observer",
    "SerdeConformance": "serde",
    "StorageConformance": "storage",
    "aligned": "memory",
    "context": "contexts",
    "dist": "distributions",
    "faulty": "faults",
    "installed": "distributions",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # pytest is imported only by those who use a suite
        return getattr(import_module(f"kvcore.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
