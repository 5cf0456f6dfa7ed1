"""What a tier is made of, as its loads and stores use it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kvcore.api import ObjectKey
from kvcore.l2.buffers import StagingPool
from kvcore.l2.calls import Calls
from kvcore.l2.codec import Codec
from kvcore.l2.record import Record


class Stack(NamedTuple):
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
