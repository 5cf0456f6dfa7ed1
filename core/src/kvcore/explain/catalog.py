"""What the namespaces of this user's caches stood for, also of processes that have ended: a cache that finds nothing
after a restart mostly has another namespace, and only who made the old one knew what it was."""

import dataclasses
import json
import operator
import os
from pathlib import Path
from typing import Any

from kvcore.engine import GroupSpec, ModelSpec
from kvcore.engine.identity import Identity
from kvcore.observe import logger

FILE = "namespaces.jsonl"
MAX_BYTES = 4 << 20
"""Then the older half goes."""


class Catalog:
    """A file in a folder that is this user's alone, a line of JSON for each namespace. No method raises: what cannot be
    written or read is not known.

    Tenants have no line: they may be salts, and many.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._written: set[bytes] = set()

    def note(self, namespace: bytes, identity: Identity) -> None:
        """Keep what a namespace stands for, once."""
        if identity.tenant or namespace in self._written:
            return
        self._written.add(namespace)
        fields = {"namespace": namespace.hex(), **_plain(identity)}
        line = (
            json.dumps(fields, separators=(",", ":"), default=operator.index).encode() + b"\n"
        )  # numpy's numbers, too
        try:
            if namespace in self.all():
                return
            self._shorten()
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.write(file, line)  # in one go: other processes append, too
            finally:
                os.close(file)
        except OSError as error:
            logger.debug("%s: %s", self.path, error.strerror)

    def all(self) -> dict[bytes, Identity]:
        """Namespace -> what it stood for, the latest last."""
        found = {}
        try:
            text = self.path.read_bytes()
        except OSError:
            return {}
        for line in text.splitlines():
            try:
                fields = json.loads(line)
                namespace = bytes.fromhex(fields.pop("namespace"))
                found[namespace] = _identity(fields)
            except (ValueError, KeyError, TypeError, AttributeError):  # torn, or another version's
                continue
        return found

    def _shorten(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < MAX_BYTES:
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        new = self.path.with_suffix(f".{os.getpid()}")
        try:
            new.touch(mode=0o600)
            new.write_bytes(b"".join(lines[len(lines) // 2 :]))
            new.replace(self.path)
        except OSError:  # such as of a full disk
            new.unlink(missing_ok=True)
            raise


def _plain(identity: Identity) -> dict[str, Any]:
    spec = identity.spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    groups = [dataclasses.asdict(group) for group in spec.groups]
    return {
        "spec": {**fields, "parallel": dict(spec.parallel), "extra": dict(spec.extra), "groups": groups},
        "chunk_tokens": identity.chunk_tokens,
        "scheme": identity.scheme,
        "salt": identity.salt,
        "lossy": list(identity.lossy),
    }


def _identity(fields: dict[str, Any]) -> Identity:
    spec = fields.pop("spec")
    groups = tuple(
        GroupSpec(tuple(g["layers"]), tuple(g["block_bytes"]), g["window_tokens"]) for g in spec.pop("groups")
    )
    return Identity(ModelSpec(**spec, groups=groups), **fields)
