"""Keeps an engine connected to its server: a thread that connects, sleeps while the link lives, and connects again."""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from kvcore.api import ServiceError
from kvcore.config import Address
from kvcore.observe import Throttle, logger
from kvcore.service import wire
from kvcore.service.address import connect
from kvcore.service.greeting import welcome_of
from kvcore.service.link import Link
from kvcore.service.wake import Wake

RETRY_S = (0.01, 0.5)
"""The first pause after a failure, and the longest: each is twice as long as the one before."""
REFUSED_S = 10.0
"""The pause after the server has refused us."""
CONNECT_S = 1.0
CLOSE_S = 2.0


class Keeper:
    """See above.

    Args:
        address: the server's.
        hello: our first message.
        adopt: makes a link of a connected socket and the server's welcome, and puts it to use.
        absent: called when nobody listens there.
    """

    def __init__(
        self,
        address: Address,
        hello: wire.Hello,
        adopt: Callable[[socket.socket, wire.Welcome], Link],
        absent: Callable[[], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._adopt = adopt
        self._absent = absent
        self._closing = False
        self._socket: socket.socket | None = None
        """From before it is connected to the end of its link: the child of a fork must not keep it open."""
        self._log = Throttle()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="kvcore-link", daemon=True)
        _keepers.add(self)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the link. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._wake.close()

    def _run(self) -> None:
        pause = RETRY_S[0]
        while not self._closing:
            try:
                link = self._connect()
            except ServiceError as error:
                text = f"the server at {self._address} refuses this engine, which runs without it: {error}"
                self._log.warning("refused", text)
                pause = REFUSED_S
            except (OSError, EOFError, wire.ProtocolError) as error:
                why = getattr(error, "strerror", None) or str(error) or "it closed the connection"
                text = f"no server answers at {self._address} ({why}): this engine runs without a cache until one does"
                self._log.warning("away", text)
                if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    self._absent()
            else:
                if link is not None:
                    logger.info("connected to the server at %s", self._address)
                    began = time.monotonic()
                    link.watch(self._wake)
                    link.close()
                    if time.monotonic() > began + RETRY_S[1]:
                        pause = RETRY_S[0]
            self._sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    def _connect(self) -> Link | None:
        """None when we are closing. Waits for a server that accepts and says nothing: it is frozen, and may thaw."""
        made = connect(self._address, CONNECT_S, self._made)
        try:
            made.sendall(wire.frame(self._hello))
            frames = wire.Frames(wire.MAX_WELCOME)
            while True:
                poll = select.poll()
                poll.register(made, select.POLLIN)
                poll.register(self._wake, select.POLLIN)
                poll.poll()
                if self._closing:
                    made.close()
                    return None
                data = made.recv(wire.MAX_WELCOME)
                if not data:
                    raise EOFError
                for body in frames.cut(memoryview(data)):
                    return self._adopt(made, welcome_of(body))
        except BaseException:
            made.close()
            raise

    def _made(self, made: socket.socket) -> None:
        self._socket = made

    def _forked(self) -> None:
        """In the child of a fork: the connection is the parent's, and ends with it."""
        if self._socket is not None:
            with suppress(OSError):
                os.close(self._socket.detach())

    def _sleep(self, seconds: float) -> None:
        with suppress(OSError):
            select.select([self._wake], [], [], seconds)


_keepers: "weakref.WeakSet[Keeper]" = weakref.WeakSet()


def _forked() -> None:
    for keeper in list(_keepers):
        keeper._forked()


os.register_at_fork(after_in_child=_forked)
