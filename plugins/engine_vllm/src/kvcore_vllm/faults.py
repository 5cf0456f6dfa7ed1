"""The guard around every call that vLLM makes."""

import logging

from kvcore import engine
from kvcore.engine import guarded

__all__ = ["Guarded", "guarded", "logger"]

logger = logging.getLogger("kvcore.vllm")


class Guarded(engine.Guarded):
    """Says under the plugin's name what failed."""

    logger = logger
