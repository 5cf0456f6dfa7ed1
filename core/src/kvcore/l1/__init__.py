"""L1: host memory. An arena of shared memory, an allocator of slots in it, and a table of objects with leases."""

from kvcore.l1.allocator import Allocator
from kvcore.l1.arena import Arena, ArenaView
from kvcore.l1.leases import ReadLease, WriteLease
from kvcore.l1.objects import L1
from kvcore.l1.spaces import L1Object, ObjectSpace

__all__ = ["L1", "Allocator", "Arena", "ArenaView", "L1Object", "ObjectSpace", "ReadLease", "WriteLease"]
