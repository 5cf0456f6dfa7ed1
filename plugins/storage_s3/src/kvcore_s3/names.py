"""What objects are called in the bucket: `PREFIX/NAMESPACE/GROUP-HASH`, all in hexadecimal but the prefix.

A namespace is a folder, so that people can see, measure and delete what one model has; the hash in the name spreads the
load over S3's partitions.
"""

from kvcore.api import ObjectKey


class Names:
    """Keys to names and back, below one prefix (no slash at either end; may be empty)."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/" if prefix else ""
        """What every name begins with."""

    def name(self, key: ObjectKey) -> str:
        """The object's name."""
        return self.root + key.name.replace("-", "/", 1)

    def folder(self, namespace: bytes) -> str:
        """What the names of all objects of this namespace begin with."""
        return f"{self.root}{namespace.hex()}/"

    def key(self, name: str) -> ObjectKey | None:
        """The key of the object of this name; None for what is not ours."""
        namespace, slash, rest = name.removeprefix(self.root).partition("/")
        if not name.startswith(self.root) or not slash:
            return None
        try:
            return ObjectKey.from_name(f"{namespace}-{rest}")
        except ValueError:
            return None
