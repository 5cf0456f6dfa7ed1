"""Spaces and their objects: the tables that a lookup reads."""

from typing import TYPE_CHECKING

import msgspec

from kvcore.api import ObjectKey
from kvcore.l1.allocator import round_up

if TYPE_CHECKING:
    from kvcore.l1.pools import Pool


class ObjectSpace:
    """The objects of one namespace and group, all `nbytes` long, of one tenant. `pool` is where its objects count."""

    __slots__ = ("group", "namespace", "nbytes", "objects", "pool", "slot_bytes", "staging", "tenant")

    def __init__(self, namespace: bytes, group: int, nbytes: int, tenant: str, pool: "Pool") -> None:
        self.namespace = namespace
        self.group = group
        self.nbytes = nbytes
        self.slot_bytes = round_up(nbytes)
        self.tenant = tenant
        self.pool = pool
        self.objects: dict[bytes, L1Object] = {}
        self.staging: dict[bytes, L1Object] = {}


class L1Object(msgspec.Struct, eq=False, gc=False):
    """One object and its slot. Fields change only under the table's lock; compared and hashed by identity.

    A msgspec struct, because making one costs a third of a class with slots. One that is temporary goes with its last
    reader. When it has already left its space's table (its time was over), nobody finds it until then.
    """

    space: ObjectSpace
    chunk_hash: bytes
    slot: int
    temporary: bool = False
    readers: int = 0

    @property
    def key(self) -> ObjectKey:
        """The object's name outside L1."""
        return ObjectKey(self.space.namespace, self.chunk_hash, self.space.group)
