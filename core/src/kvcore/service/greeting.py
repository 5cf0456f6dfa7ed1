"""What the server answers to a client's first message."""

from kvcore import __version__
from kvcore.api import ServiceError
from kvcore.config import Address, ServerConfig
from kvcore.service import wire
from kvcore.service.address import connect


def hello_of(config: ServerConfig, name: str, pid: int) -> wire.Hello:
    """The first message of a client with this name in this process."""
    token = "" if config.token is None or config.url[0].path else config.token.get_secret_value()
    return wire.Hello(wire.PROTOCOL, __version__, name[:200], pid, token)


def welcome_of(body: memoryview) -> wire.Welcome:
    """The server's answer. Raises `ServiceError` when it refuses us, `ProtocolError` when it is no answer."""
    preamble = wire.decode_preamble(body)
    if preamble.protocol != wire.PROTOCOL:
        raise ServiceError(
            f"this is kvcore {__version__} (protocol {wire.PROTOCOL}), the server is kvcore {preamble.version[:40]} "
            f"(protocol {preamble.protocol}): install the same version on both sides"
        )
    welcome = wire.decode_welcome(body)
    if isinstance(welcome, wire.Refused):
        raise ServiceError(welcome.reason)
    return welcome


def ask(address: Address, hello: wire.Hello, timeout_s: float) -> wire.Welcome:
    """Connect, say hello, hear the answer, and leave. Raises `OSError`, `EOFError`, and as `welcome_of`."""
    with connect(address, timeout_s) as made:
        made.settimeout(timeout_s)
        made.sendall(wire.frame(hello))
        frames = wire.Frames(wire.MAX_WELCOME)
        while data := made.recv(wire.MAX_WELCOME):
            for body in frames.cut(memoryview(data)):
                return welcome_of(body)
    raise EOFError
