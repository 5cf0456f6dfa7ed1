"""The far end of the loopback limit, as a process of its own: `socket_end.py CONNECTIONS OBJECT_BYTES` prints its port.

Per object the near end sends one byte: `w`, then the object, which is answered by one byte; or `r`, which is answered
by an object. That is the least that any store has to move. Needs nothing but the standard library.
"""

import socket
import sys
import threading


def receive(connection: socket.socket, room: memoryview) -> bool:
    """Fill `room`. False: the other end has closed."""
    at = 0
    while at < len(room):
        got = connection.recv_into(room[at:])
        if not got:
            return False
        at += got
    return True


def _serve(connection: socket.socket, object_bytes: int) -> None:
    room = memoryview(bytearray(object_bytes))
    command = memoryview(bytearray(1))
    try:
        while receive(connection, command):
            if command[0] == ord("r"):
                connection.sendall(room)
            elif not receive(connection, room):
                return
            else:
                connection.sendall(b".")
    except OSError:
        return  # the near end is gone


def main(connections: int, object_bytes: int) -> None:
    """Serve until every connection has ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threads = [
        threading.Thread(target=_serve, args=(listener.accept()[0], object_bytes), daemon=True)
        for _ in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
