"""Where keys come from. No error and no log line ever holds a key or a part of one."""

import os
import re
import stat
from pathlib import Path

from kvcore.api import ConfigError

_HEX = re.compile(r"[0-9A-Fa-f]{64}")
_MOST = 4096


def read_key(name: str, source: str) -> bytes:
    """The 32 bytes of key `name`, from `env:NAME` or `file:PATH`. Raises `ConfigError`."""
    kind, _, place = source.partition(":")
    if kind == "env":
        text = os.environ.get(place)
        if text is None:
            raise ConfigError(f"key {name!r}: the environment variable {place} is not set")
    else:
        try:
            text = _read(place)
        except (OSError, RuntimeError, ValueError) as error:  # also `~nobody` and a NUL in the name
            raise ConfigError(f"key {name!r}: {place} cannot be read ({getattr(error, 'strerror', error)})") from None
    text = text.strip()
    if not _HEX.fullmatch(text):
        raise ConfigError(
            f"key {name!r}: {source} holds {len(text)} characters; 64 hexadecimal digits are needed, such as "
            "`openssl rand -hex 32` makes"
        )
    return bytes.fromhex(text)


def _read(place: str) -> str:
    """The beginning of a regular file; nothing else is waited for or read without end."""
    file = os.open(Path(place).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a regular file")
        return os.read(file, _MOST).decode("ascii", "replace")
    finally:
        os.close(file)
