"""Mooncake's error codes in words."""

from collections.abc import Mapping

OK = 0
NO_SPACE = -200
INVALID = -600
NOT_READY = -703
NOT_FOUND = -704
ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMEOUT = -901

ABSENT = (NOT_READY, NOT_FOUND, -710, -712)
"""The pool has no object of this key, or not yet."""

MASTER_SILENT = (RPC_FAILED, RPC_TIMEOUT)
"""The master did not answer."""

_WORDS: Mapping[int, str] = {
    -1: "internal error",
    -10: "buffer overflow",
    -100: "shard index out of range",
    -101: "no such segment",
    -102: "segment already exists",
    -103: "the master does not know this client",
    NO_SPACE: "no space in any segment of the pool",
    -300: "invalid version",
    -400: "invalid key",
    -500: "write failed",
    INVALID: "invalid parameters, or the client is not set up",
    -601: "this client may not do that",
    -700: "invalid write",
    -701: "invalid read",
    -702: "invalid replica",
    NOT_READY: "the object is still being written",
    NOT_FOUND: "no such object",
    ALREADY_EXISTS: "the object exists already",
    -706: "the object is leased to a reader",
    LEASE_EXPIRED: "the lease expired before the object had come: raise the master's --default_kv_lease_ttl",
    -708: "the object is being replicated",
    -709: "the object is not being replicated",
    -710: "no such replica",
    -711: "the replica exists already",
    -712: "the replica is gone",
    -713: "the replica is not in this machine's memory",
    -714: "the replica is busy",
    TRANSFER_FAILED: "the transfer failed: the machine that holds the object is down, hangs or cannot be reached",
    -801: "checksum mismatch",
    RPC_FAILED: "the master cannot be reached",
    RPC_TIMEOUT: "the master did not answer in time",
    -1000: "etcd failed",
    -1001: "no such key in etcd",
    -1002: "an etcd transaction failed",
    -1003: "the etcd operation was cancelled",
    -1010: "not possible in the master's present state (a standby that takes over?)",
    -1011: "not possible in the master's mode",
    -1100: "no such file",
    -1101: "a file could not be opened",
    -1102: "a file could not be read",
    -1103: "a file could not be written",
}
_KINDS: Mapping[int, str] = {NO_SPACE: "full", RPC_TIMEOUT: "timeout", LEASE_EXPIRED: "timeout"}


def words(code: int) -> str:
    """What `code` means, with the code."""
    return f"{_WORDS.get(code, 'unknown error')} (Mooncake error {code})"


def kind(code: int) -> str:
    """The `kind` of a `Failed` for `code`."""
    return _KINDS.get(code, "io")
