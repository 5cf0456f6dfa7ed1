"""L2: tiers of storage behind L1. A tier frames, encodes, checks and times what a storage plugin moves."""

from kvcore.l2.capacity import Capacity
from kvcore.l2.codec import Codec, Payload
from kvcore.l2.frame import HEADER_BYTES
from kvcore.l2.parcels import Moved, Parcel
from kvcore.l2.threads import Threads
from kvcore.l2.tier import Tier
from kvcore.l2.told import Told
from kvcore.l2.traced import TracedTier

__all__ = [
    "HEADER_BYTES",
    "Capacity",
    "Codec",
    "Moved",
    "Parcel",
    "Payload",
    "Threads",
    "Tier",
    "Told",
    "TracedTier",
]
