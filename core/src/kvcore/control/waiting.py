"""What waits to be written to a tier: in turns among tenants, and so that none takes all the room there is."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """Jobs of one queue, oldest first for each tenant, one tenant after another.

    Args:
        limit: bytes that may wait or be on their way.
        divided: a tenant may have waiting at most as much as it leaves free, so that however much one has, there is
            room for the next; without, whoever comes first takes it all.
    """

    def __init__(self, limit: int, divided: bool) -> None:
        self.nbytes = 0
        """Waiting or on their way."""
        self._limit = limit
        self._divided = divided
        self._bytes: dict[str, int] = {}  # of each tenant that has any
        self._jobs: OrderedDict[str, deque[T]] = OrderedDict()  # in order of turns

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def room(self, tenant: str, most: int) -> int:
        """Bytes that the tenant may add, when it may have `most` in all."""
        free = self._limit - self.nbytes
        if not self._divided:
            return free
        mine = self._bytes.get(tenant, 0)
        return min((free - mine) // 2, most - mine)

    def put(self, tenant: str, job: T) -> None:
        """Add a job; its bytes are counted by `account`."""
        self._jobs.setdefault(tenant, deque()).append(job)

    def take(self) -> T:
        """The next job. Raises `StopIteration` when there is none."""
        tenant, jobs = next(iter(self._jobs.items()))
        job = jobs.popleft()
        if jobs:
            self._jobs.move_to_end(tenant)
        else:
            del self._jobs[tenant]
        return job

    def account(self, tenant: str, nbytes: int) -> None:
        """So many bytes of the tenant have come, or (negative) have been written or dropped."""
        self.nbytes += nbytes
        left = self._bytes.get(tenant, 0) + nbytes
        if left:
            self._bytes[tenant] = left
        else:
            self._bytes.pop(tenant, None)
