"""The far end of a lookup's limit, as a process of its own: `echo_end.py FD ASKED_BYTES ANSWERED_BYTES`.

For so many bytes it answers with so many, over a socket that it inherits. Needs nothing but the standard library.
"""

import socket
import sys


def ask(connection: socket.socket, asked: bytes, room: memoryview) -> None:
    """The near end: send, and fill `room`. Raises `OSError` when the far end is gone."""
    connection.sendall(asked)
    if not fill(connection, room):
        raise OSError("the far end is gone")


def fill(connection: socket.socket, room: memoryview) -> bool:
    """Fill `room`. False: the other end has closed."""
    at = 0
    while at < len(room):
        got = connection.recv_into(room[at:])
        if not got:
            return False
        at += got
    return True


def main(fd: int, asked: int, answered: int) -> None:
    """Answer until the near end closes."""
    room, answer = memoryview(bytearray(asked)), bytes(answered)
    with socket.socket(fileno=fd) as connection:
        while fill(connection, room):
            connection.sendall(answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
