"""The error tree. Every error that kvcore raises on purpose is a `KVCoreError`.

An error text names the thing, the value, what is allowed, and the next step.
"""


class KVCoreError(Exception):
    """Root of all errors raised by kvcore and its plugins."""


class ConfigError(KVCoreError):
    """The configuration is wrong. The text lists every fault, each with its place and what is allowed."""


class PluginError(KVCoreError):
    """A selected plugin is missing, clashes, was built for another API, or fails to import or open."""


class LayoutError(KVCoreError):
    """The engine's KV layout cannot be cached safely."""


class ArenaError(KVCoreError):
    """Host memory for L1 could not be had or attached."""


class LeaseError(KVCoreError):
    """A lease ended before it was used: what it guarded may be gone, and must be computed again."""


class ServiceError(KVCoreError):
    """The cache server cannot serve as it was asked to, or refuses a client."""


class StorageError(KVCoreError):
    """A storage cannot serve this call at all; the core counts it against the tier and treats loads as misses.

    Raise it (or return `Failed` for single keys) from any `Storage` method.
    """


class StorageUnavailable(StorageError):
    """The store does not answer now, and may later. Raised by `open`, it does not stop the start: requests go on
    without the tier, and `open` is called again until it succeeds."""


class SerdeError(KVCoreError):
    """A serde cannot encode or decode these bytes; the object is a miss."""


class SerdeUnavailable(SerdeError):
    """A serde lacks what these bytes need, such as a key that is not configured here: the object is a miss, and stays
    for those who have it."""


class FrameError(KVCoreError):
    """Stored bytes are not a valid frame for this key (see `docs/format.md`); the object is a miss.

    `reason` is a fixed word for metrics: `short`, `magic`, `version`, `header`, `length`, `key`, `checksum`, `serde`,
    `unknown_serde`, `unsealed`.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
