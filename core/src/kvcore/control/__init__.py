"""The controllers behind the cache engine: they plan, the tiers and the data plane move bytes."""

from kvcore.control.admission import LoadAdmission, Step
from kvcore.control.batches import Batches, Lent
from kvcore.control.events import sort_events
from kvcore.control.fetch import Fetch, Fetcher, Want
from kvcore.control.locate import locate, unheard
from kvcore.control.manager import StorageManager

__all__ = [
    "Batches",
    "Fetch",
    "Fetcher",
    "Lent",
    "LoadAdmission",
    "Step",
    "StorageManager",
    "Want",
    "locate",
    "sort_events",
    "unheard",
]
