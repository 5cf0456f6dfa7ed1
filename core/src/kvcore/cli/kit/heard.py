"""What plugins and tiers log while a command uses them: the command says itself what is wrong."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.observe import logger


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged as a warning meanwhile, which then is not printed as well."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
