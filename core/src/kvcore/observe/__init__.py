"""Metrics and logging."""

from kvcore.observe.log import Throttle, logger
from kvcore.observe.metrics import METRICS, Metrics

__all__ = ["METRICS", "Metrics", "Throttle", "logger"]
