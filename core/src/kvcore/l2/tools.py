"""What a tier lends its loads and stores."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kvcore.api import ObjectKey
from kvcore.l2.buffers import StagingPool
from kvcore.l2.calls import Calls
from kvcore.l2.codec import Codec
from kvcore.l2.record import Record


class Tools(NamedTuple):
    """One tier's.

    Args:
        on_thread: runs a function on a thread, within the tier's deadline.
        delete: takes objects out of the storage.
    """

    codec: Codec
    calls: Calls
    staging: StagingPool
    record: Record
    on_thread: Callable[..., Awaitable[Any]]
    delete: Callable[[Sequence[ObjectKey]], Awaitable[bool]]
