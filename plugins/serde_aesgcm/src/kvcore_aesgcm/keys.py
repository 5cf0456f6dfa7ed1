"""Where keys come from. No error and no log line ever holds a key or a part of one."""

import os
import re
from pathlib import Path

from kvcore.api import ConfigError

_HEX = re.compile(r"[0-9A-Fa-f]{64}")


def read_key(name: str, source: str) -> bytes:
    """The 32 bytes of key `name`, from `env:NAME` or `file:PATH`. Raises `ConfigError`."""
    kind, _, place = source.partition(":")
    if kind == "env":
        text = os.environ.get(place)
        if text is None:
            raise ConfigError(f"key {name!r}: the environment variable {place} is not set")
    else:
        try:
            text = Path(place).expanduser().read_text("ascii", "replace")
        except OSError as error:
            raise ConfigError(f"key {name!r}: {place} cannot be read ({error.strerror})") from None
    text = text.strip()
    if not _HEX.fullmatch(text):
        raise ConfigError(
            f"key {name!r}: {source} holds {len(text)} characters; 64 hexadecimal digits are needed, such as "
            "`openssl rand -hex 32` makes"
        )
    return bytes.fromhex(text)
