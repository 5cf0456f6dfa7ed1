"""L1: host memory. An arena of shared memory, an allocator of slots in it, and a table of objects with leases."""

from kvcore.l1.allocator import Allocator
from kvcore.l1.arena import Arena, ArenaView
from kvcore.l1.objects import L1, L1Object, ObjectSpace, ReadLease, WriteLease

__all__ = ["L1", "Allocator", "Arena", "ArenaView", "L1Object", "ObjectSpace", "ReadLease", "WriteLease"]
