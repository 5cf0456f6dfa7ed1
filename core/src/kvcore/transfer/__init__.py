"""The data plane: copies between an engine's paged KV and slots of the arena, by plan.

`Copy` is import-light; `PagedCache` imports torch when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from kvcore.transfer.plan import Copy

if TYPE_CHECKING:
    from kvcore.transfer.paged import PagedCache

__all__ = ["Copy", "PagedCache"]


def __getattr__(name: str) -> Any:
    if name == "PagedCache":
        from kvcore.transfer.paged import PagedCache

        return PagedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
