"""Does a server answer? Asked past Mooncake's library, which holds Python's lock while it waits for its master."""

import re
import socket
from urllib.parse import urlsplit

from kvcore_mooncake.config import host_and_port

PROBE_S = 1.0
_NO_REQUEST = bytes(64)  # no RPC protocol begins so: a server that runs hangs up, one that hangs does not


def answers(address: str, timeout_s: float = PROBE_S) -> bool:
    """Does the master at `HOST:PORT` run and serve? A frozen one accepts connections and says nothing.

    True for an address of another form, such as `etcd://...`: it cannot be asked.
    """
    place = host_and_port(address)
    if place is None:
        return True
    try:
        with socket.create_connection(place, timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_NO_REQUEST)
            connection.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return True  # hung up on us: it lives
    except OSError:
        return False
    return True


def accepts(url: str, timeout_s: float = PROBE_S) -> bool:
    """Does one of the servers of a metadata address (`http://HOST:PORT/metadata`, `etcd://A:2379;B:2379`) take
    connections? True for `P2PHANDSHAKE`, which has none."""
    if "://" not in url:
        return True
    servers = re.split("[;,]", urlsplit(url).netloc)
    places = [place for place in map(host_and_port, servers) if place is not None]
    for place in places:
        try:
            socket.create_connection(place, timeout_s).close()
        except OSError:
            continue
        return True
    return not places


def own_address(master: str) -> str:
    """The address from which this machine reaches `master`; its host name when that cannot be told."""
    place = host_and_port(master)
    try:
        if place is None:
            return socket.gethostname()
        family, kind, proto, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as udp:
            udp.connect(target)  # sends nothing: the system only chooses the way
            return str(udp.getsockname()[0])
    except OSError:
        return socket.gethostname()
