"""The far end of a lookup's limit, as a process of its own: `echo_end.py FD ASKED_BYTES ANSWERED_BYTES`.

For so many bytes it answers with so many, over a socket that it inherits.
"""

import socket
import sys

from kvcore_bench.speed.socket_end import receive


def ask(connection: socket.socket, asked: bytes, room: memoryview) -> None:
    """The near end: send, and fill `room`. Raises `OSError` when the far end is gone."""
    connection.sendall(asked)
    if not receive(connection, room):
        raise OSError("the far end is gone")


def main(fd: int, asked: int, answered: int) -> None:
    """Answer until the near end closes."""
    room, answer = memoryview(bytearray(asked)), bytes(answered)
    with socket.socket(fileno=fd) as connection:
        while receive(connection, room):
            connection.sendall(answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
