"""The controllers behind the cache engine: they plan, the tiers and the data plane move bytes."""

from kvcore.control.admission import Step
from kvcore.control.batches import Batches, Lent
from kvcore.control.fetch import Fetch, Want
from kvcore.control.locate import locate, unheard
from kvcore.control.manager import StorageManager

__all__ = [
    "Batches",
    "Fetch",
    "Lent",
    "Step",
    "StorageManager",
    "Want",
    "locate",
    "unheard",
]
