"""What namespaces stand for: a namespace is a fingerprint, from which nothing can be read."""

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcore.engine.space import ModelSpec

MAX_IDENTITIES = 1024
"""The latest are kept: tenants have namespaces of their own, and may be many."""


class Identity(NamedTuple):
    """All that went into a namespace; of the salt a short hash, see `salt_word`."""

    spec: ModelSpec
    chunk_tokens: int
    scheme: str
    tenant: str = ""
    salt: str = ""
    lossy: Sequence[str] = ()


class Kept(Protocol):
    """What outlives this process. No method raises."""

    def note(self, namespace: bytes, identity: Identity) -> None: ...
    def all(self) -> dict[bytes, Identity]: ...


class Identities:
    """Those that were registered, also when nobody uses them any more. Thread-safe."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self._known: dict[bytes, Identity] = {}
        self._lock = threading.Lock()

    def note(self, namespace: bytes, identity: Identity) -> None:
        """This namespace has been registered."""
        with self._lock:
            self._known.pop(namespace, None)
            self._known[namespace] = identity
            while len(self._known) > MAX_IDENTITIES:
                del self._known[next(iter(self._known))]
        if self.kept is not None:
            self.kept.note(namespace, identity)

    def keep(self, kept: Kept) -> None:
        """Have all of them kept, those that are known and those that come."""
        self.kept = kept
        for namespace, identity in self.all().items():
            kept.note(namespace, identity)

    def all(self) -> dict[bytes, Identity]:
        """Namespace -> what it stands for, the latest last."""
        with self._lock:
            return dict(self._known)
