"""What every open cache shows of itself to its own user, embedded in an engine or served, with nothing configured.

`show` opens a door (a Unix socket) for a cache; `caches` finds the doors of this user, and `ask` asks behind one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.service.inspect.client import Cache, NoAnswer, Refusal, ask, at_url, caches
    from kvcore.service.inspect.door import show
    from kvcore.service.inspect.subject import Subject

__all__ = ["Cache", "NoAnswer", "Refusal", "Subject", "ask", "at_url", "caches", "show"]

_HOMES = {"show": "door", "Subject": "subject"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"kvcore.service.inspect.{_HOMES.get(name, 'client')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
