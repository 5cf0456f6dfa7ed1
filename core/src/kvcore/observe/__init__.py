"""Metrics and logging, and the records of what was decided and what became of objects."""

from kvcore.observe.decisions import Asked, Decision, Decisions
from kvcore.observe.journal import Journal
from kvcore.observe.log import Throttle, logger
from kvcore.observe.metrics import METRICS, Metrics

__all__ = [
    "METRICS",
    "Asked",
    "Decision",
    "Decisions",
    "Journal",
    "Metrics",
    "Throttle",
    "logger",
]
