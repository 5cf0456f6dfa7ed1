"""Whether the servers of a configuration answer, for `kvcore doctor`."""

import os
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from kvcore.api import ArenaError, ServiceError, format_size
from kvcore.api.engine import Finding
from kvcore.config import ServerConfig
from kvcore.l1.arena import open_arena

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
            remedy = "give both sides the same version of kvcore, and over TCP the same `server.token`"
            yield Finding("error", subject, f"it refuses us: {error}", remedy)
        except TimeoutError:
            text = f"it accepts connections, but has not answered for {ANSWER_S:g} s"
            yield Finding(
                "error", subject, text, "see what its process is doing; engines run without a cache meanwhile"
            )
        except PermissionError as error:
            text = f"it cannot be connected to: {error.strerror or error}"
            yield Finding("error", subject, text, "run the server and its engines as one user")
        except (OSError, EOFError, wire.ProtocolError) as error:
            text = f"nobody answers: {getattr(error, 'strerror', None) or error or 'it closed the connection'}"
            remedy = "start it: kvcore serve --config FILE; engines run without a cache until then"
            folder = os.path.dirname(address.path)
            if address.path and not os.path.isdir(folder):
                text, remedy = (
                    f"there is no {folder} for its socket",
                    f"mkdir -p {folder}, in every container; then {remedy}",
                )
            yield Finding("warning", subject, text, remedy)
            yield from _http(one)
        else:
            if not address.path:
                yield from _arena(subject, dict(welcome.arena))
            size = int(welcome.arena["size"])
            text = f"kvcore {welcome.version}, L1 of {format_size(size)}, answers in {seconds * 1e3:.1f} ms"
            data = {"l1_bytes": size, "answer_seconds": seconds}
            if seconds > config.timeout:
                text += f", and engines wait {config.timeout * 1e3:g} ms: they would go on without it"
                remedy = "see what keeps this machine busy, or raise `server.timeout`"
                yield Finding("warning", subject, text, remedy, data)
            else:
                yield Finding("ok", subject, text, data=data)


def _arena(subject: str, descriptor: dict[str, Any]) -> Iterator[Finding]:
    """Over TCP, workers open the server's memory by its process: a Unix socket hands it to them."""
    try:
        os.close(open_arena(descriptor))
    except ArenaError as error:
        remedy = (
            "use server: unix:///..., on a volume that both see; or one PID namespace (shareProcessNamespace) and user"
        )
        yield Finding("error", subject, f"it answers, but its memory cannot be reached: {error}", remedy)


def _http(config: ServerConfig) -> Iterator[Finding]:
    """Whether a server that does not run yet could serve HTTP."""
    if config.http is None:
        return
    listen = config.http.listen
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        text = f"server.http is set, and {' and '.join(missing)} cannot be imported"
        yield Finding("error", "http", text, "pip install 'kvcore[http]', or take http out of server")
        return
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            text = f"{listen} cannot be listened on: {error.strerror}"
            yield Finding(
                "error", "http", text, "give an address of this machine and a free port: ss -ltnp shows who has it"
            )
