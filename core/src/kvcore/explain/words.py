"""Why a chunk was not usable, in sentences, with the next step: for each word that a lookup gives as the reason."""

from typing import NamedTuple

from kvcore.explain.models import Reason


class Words(NamedTuple):
    """Args: text: what follows "chunk 6 ..."; `{tier}` is the tier's name. remedy: the next step."""

    reason: Reason
    text: str
    remedy: str


LOOK_LOG = "look at the log"
DOCTOR = "`kvcore doctor FILE` tries every tier and says what is wrong with it"
BROKE: dict[str, Words] = {
    "tier_down": Words("tier_down", "may be in {tier}, which was left alone: its circuit breaker was open", DOCTOR),
    "no_answer": Words(
        "tier_down", "may be in {tier}, which did not say in time whether it has it",
        "`kvcore bench l2 FILE` measures the tier; a longer `lookup_timeout`",
    ),
    "slow_tier": Words(
        "slow_tier", "was in {tier}, but is sooner computed than loaded from there",
        "nothing, or a faster tier; `read: always` where the engine's time is dearer than the request's",
    ),
    "lookup_timeout": Words(
        "timeout", "was in {tier}, but had not come within `lookup_timeout`",
        "`kvcore bench l2 FILE` measures the tier; a longer `lookup_timeout`, a faster tier, or no serde",
    ),
    "timeout": Words(
        "timeout", "was in {tier}, whose storage did not deliver it within its `timeout`",
        "`kvcore bench l2 FILE` measures the tier; a longer `timeout`, a faster tier, or no serde",
    ),
    "stalled": Words(
        "timeout", "was asked for, but the tiers did not run at all: something blocks their loop",
        f"{LOOK_LOG}; a plugin that blocks is a bug of it",
    ),
    "corrupt": Words(
        "corrupt", "was in {tier}, but damaged: its checksum or header said so, and it was deleted",
        "`kvcore store verify --config FILE` reads all; look at the disk, or whatever lies below",
    ),
    "version": Words(
        "unreadable", "was in {tier}, in the format of another release",
        "`kvcore store gc --versions --config FILE` deletes what cannot be read",
    ),
    "unknown_serde": Words(
        "unreadable", "was in {tier}, encoded by a serde that is not installed here",
        "install it, or `kvcore store gc --serdes --config FILE`",
    ),
    "serde": Words("unreadable", "was in {tier}, but could not be decoded", LOOK_LOG),
    "evicted_from_tier": Words(
        "unknown", "was in {tier} when it was asked, and gone when it was to be loaded: it was evicted or "
        "deleted there by somebody else",
        "",
    ),
    "l1_full": Words(
        "l1_full", "was in {tier}, but L1 had no room to load it into: all else was in use", "a larger `l1.size`"
    ),
    "no_server": Words(
        "no_server", "could not be asked for: the server was away", "start it: `kvcore serve --config FILE`"
    ),
    "refused": Words(
        "refused", "was refused: its hash cannot name a chunk, or the server takes no more of this engine", LOOK_LOG
    ),
    "lease_expired": Words(
        "lease_expired", "was found, but its lease had ended before it was used", "a longer `l1.lease`"
    ),
    "window": Words(
        "absent", "is there, but the window of a layer before it is not: a prefix cannot end there", ""
    ),
    "closed": Words("failed", "was asked for while the cache closed", ""),
    "internal": Words("internal", "was not loaded because of a bug in kvcore", f"{LOOK_LOG}, and report it"),
}  # fmt: skip
FAILED = Words("failed", "was in {tier}, which failed to deliver it ({word})", DOCTOR)
"""For any other word: the outcome of a storage's operation."""

SKIPPED = {
    "l1_full": ("L1 had no room for it: all else was in use", "a larger `l1.size`"),
    "no_block": ("the engine had given its blocks up before they were saved", ""),
    "no_server": ("the server was away", "start it: `kvcore serve --config FILE`"),
    "refused": ("its hash cannot name a chunk", LOOK_LOG),
    "too_long": ("it stands behind the 16,384 chunks that a server takes at once", "larger chunks: `chunk_tokens`"),
    "copy": ("a worker could not copy it", LOOK_LOG),
}
"""Why an object was not stored in L1."""

DROPPED = {
    "queue_full": ("more than `queue_size` waited to be written", "a faster tier, or a larger `queue_size`"),
    "tier_down": ("its circuit breaker was open", DOCTOR),
    "lease_expired": ("it waited too long", "a faster tier, or a longer `l1.lease`"),
    "failed": ("the storage failed", DOCTOR),
    "evicted_first": ("L1 needed the room before it could be written", "a larger `l1.size`, or `write: all`"),
    "removed": ("the tier was removed", ""),
    "cleared": ("it was cleared, or its time was over, while it waited", ""),
}
"""Why an object was not written to a tier."""
