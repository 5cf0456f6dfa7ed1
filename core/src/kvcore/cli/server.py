"""Whether the servers of a configuration answer, for `kvcore doctor`."""

import os
import time
from collections.abc import Iterator

from kvcore.api import ServiceError, format_size
from kvcore.api.engine import Finding
from kvcore.config import ServerConfig

ANSWER_S = 2.0


def answers(config: ServerConfig | None) -> Iterator[Finding]:
    """One finding for each server."""
    from kvcore.service import wire
    from kvcore.service.greeting import ask, hello_of

    for address in config.url if config is not None else ():
        assert config is not None
        subject = f"server {address}"
        one = config.model_copy(update={"url": (address,)})
        try:
            began = time.perf_counter()
            welcome = ask(address, hello_of(one, "doctor", os.getpid()), ANSWER_S)
            seconds = time.perf_counter() - began
        except ServiceError as error:
            yield Finding("error", subject, f"it refuses us: {error}")
        except TimeoutError:
            text = f"it accepts connections, but has not answered for {ANSWER_S:g} s"
            yield Finding(
                "error", subject, text, "see what its process is doing; engines run without a cache meanwhile"
            )
        except (OSError, EOFError, wire.ProtocolError) as error:
            text = f"nobody answers: {getattr(error, 'strerror', None) or error or 'it closed the connection'}"
            remedy = "start it: kvcore serve --config FILE; engines run without a cache until then"
            yield Finding("warning", subject, text, remedy)
        else:
            size = int(welcome.arena["size"])
            text = f"kvcore {welcome.version}, L1 of {format_size(size)}, answers in {seconds * 1e3:.1f} ms"
            data = {"l1_bytes": size, "answer_seconds": seconds}
            if seconds > config.timeout:
                text += f", and engines wait {config.timeout * 1e3:g} ms: they would go on without it"
                remedy = "see what keeps this machine busy, or raise `server.timeout`"
                yield Finding("warning", subject, text, remedy, data)
            else:
                yield Finding("ok", subject, text, data=data)
