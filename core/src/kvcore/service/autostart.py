"""Starts a server for an engine that finds none. It outlives the engine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from kvcore.config import Config
from kvcore.observe import logger

AGAIN_S = 10.0
"""How long to wait after a start before the next."""
_DETACHED = ("/bin/sh", "-c", '"$@" &', "sh")
"""Runs the words that follow as nobody's child, so that nobody has to wait for its end."""


class Autostart:
    """Called whenever nobody listens. Of several servers that are started at once one gets the address, and the others
    end.

    Args:
        config: with `server`. flags: what was laid over the file.
    """

    def __init__(self, config: Config, flags: Mapping[str, Any]) -> None:
        assert config.server is not None
        self._log_file = f"{config.server.url[0].path}.log"
        self._command = [sys.executable, "-m", "kvcore", "serve"]
        if config.file is not None:
            self._command += ["--config", os.path.abspath(config.file)]
        for path, value in flags.items():
            self._command += ["--set", f"{path}={value if isinstance(value, str) else json.dumps(value)}"]
        self._begun = -AGAIN_S

    def __call__(self) -> None:
        """Start a server, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._begun + AGAIN_S:
            return
        self._begun = now
        try:
            os.makedirs(os.path.dirname(self._log_file), 0o700, exist_ok=True)
            log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                command = [*_DETACHED, *self._command]
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True
                )
            finally:
                os.close(log)
            logger.info("a server is started; what it says is in %s", self._log_file)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("no server can be started: %s", error)
