"""What a command shows on a terminal, from the terminal's other end."""

import os
import select
import time
from collections.abc import Callable

PATIENCE_S = 60.0


def read_until(fd: int, enough: Callable[[str], object]) -> str:
    """All that comes until it is enough."""
    text, give_up = "", time.monotonic() + PATIENCE_S
    while not enough(text):
        ready, _, _ = select.select([fd], [], [], max(0.0, give_up - time.monotonic()))
        assert ready, f"not shown within {PATIENCE_S:g} s: {text[-3000:]!r}"
        text += os.read(fd, 1 << 16).decode()
    return text
