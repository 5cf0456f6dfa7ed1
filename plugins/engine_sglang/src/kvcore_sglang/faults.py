"""The guard around every call that SGLang makes while it serves."""

import functools
import logging

from kvcore import engine

__all__ = ["Guarded", "guarded", "logger"]

logger = logging.getLogger("kvcore.sglang")
guarded = functools.partial(engine.guarded, of_first=True)
"""What SGLang asks for comes first: pages, of each of which the answer is then that it is not there."""


class Guarded(engine.Guarded):
    """Says under the plugin's name what failed."""

    logger = logger
