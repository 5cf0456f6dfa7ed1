"""Serde `raw`: bytes as they are."""

from typing import Any

from kvcore.api import ApiVersion, Component, ObjectLayout, Serde, SerdeError, hookimpl


@hookimpl
def kvcore_serde() -> Component:
    """The `raw` serde."""
    return Component(api=ApiVersion(1, 0), factory=RawSerde)


class RawSerde(Serde):
    """Encodes to the source itself, without a copy."""

    lossy = False

    def __init__(self, config: Any, context: Any) -> None:
        """Has no options."""

    @property
    def tag(self) -> str:
        """See `Serde.tag`."""
        return "raw/1"

    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        """See `Serde.encode`. The result is `source`: valid as long as that is."""
        return source

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        """See `Serde.decode`."""
        if len(source) != len(into):
            raise SerdeError(f"raw/1: {len(source)} bytes do not fill {len(into)}")
        into[:] = source

    def max_encoded_bytes(self, nbytes: int) -> int:
        """See `Serde.max_encoded_bytes`."""
        return nbytes
