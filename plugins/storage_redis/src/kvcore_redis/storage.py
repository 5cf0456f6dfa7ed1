"""The Redis storage: each object is a string, received into and sent from the caller's memory."""

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis

from kvcore.api import (
    MISSING,
    STORED,
    BlockingStorage,
    Context,
    Entry,
    Failed,
    Item,
    Loaded,
    LoadOutcome,
    ObjectKey,
    StorageError,
    StoreOutcome,
    Usage,
)
from kvcore_redis.address import Endpoint
from kvcore_redis.config import RedisConfig, sentinel_login, server_login
from kvcore_redis.connection import Command, Reply, Settings
from kvcore_redis.control import Control, scan
from kvcore_redis.node import Node
from kvcore_redis.resp import ReplyError, encode, encode_set
from kvcore_redis.router import Router
from kvcore_redis.stream import reason
from kvcore_redis.topology import Cluster, Sentinel, Single, Topology

MAX_OBJECT_BYTES = 512 << 20
"""The longest string that Redis and Valkey take (`proto-max-bulk-len`)."""
MAX_COUNTED = 100_000
"""With more keys in the database, `usage` would have to enumerate for too long."""
_REFUSED_STORES = {"OOM": "full", **dict.fromkeys(("NOPERM", "READONLY", "MISCONF", "NOREPLICAS"), "read_only")}


class RedisStorage(BlockingStorage):
    """Objects as strings in Redis or Valkey: a single server, a master behind Sentinels, or a cluster.

    A server that does not answer is no error of `open`: its objects are failed loads until it does, and the core leaves
    the tier alone meanwhile. A server that refuses us is.
    """

    persistent = True
    shared = True
    max_object_bytes = MAX_OBJECT_BYTES

    def __init__(self, config: RedisConfig, context: Context) -> None:
        self.preferred_concurrency = config.connections
        self._config = config
        self._log = context.log
        self._passive = context.passive
        self._prefix = config.prefix.encode()
        self._ttl_ms = None if config.ttl is None else round(config.ttl * 1000)
        self._login = server_login(config)
        self._control = Control(config)
        self._database = config.database or config.address.database or 0
        self._topology: Topology | None = None
        self._router: Router | None = None

    # -- the storage interface ---------------------------------------------------------------------------------------

    def open(self) -> None:
        self._topology = topology = self._make_topology()
        self._router = Router(topology, self._config.timeout)
        where = self._config.address.endpoints[0]
        try:
            refusal = self._probe(topology)
        except OSError as error:
            if self._passive:
                raise StorageError(f"{where} does not answer: {reason(error)}") from error
            self._log.warning("%s does not answer (%s): requests go on without it until it does", where, reason(error))
            return
        if refusal is None or (refusal.code in ("MOVED", "ASK") and topology.rests):
            return
        if refusal.passing:
            self._log.warning("%s is not ready (%s): requests go on without it until it is", where, refusal.text)
            return
        raise StorageError(f"{where} refuses to serve: {_explain(refusal)}")

    def close(self) -> None:
        if self._topology is not None:
            self._topology.close()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        names = [self._name(key) for key in keys]
        replies = self._run([Command(name, (encode(b"EXISTS", name),)) for name in names])
        self._insist(replies, "asked for")
        return [reply == 1 for reply in replies]

    def load(self, items: Sequence[Item]) -> list[LoadOutcome]:
        commands = []
        for item in items:
            name = self._name(item.key)
            commands.append(Command(name, (encode(b"GET", name),), item.nbytes, item.buffers))
        return [_loaded(item, reply) for item, reply in zip(items, self._run(commands), strict=True)]

    def store(self, items: Sequence[Item]) -> list[StoreOutcome]:
        outcomes: list[StoreOutcome] = []
        commands = []
        for item in items:
            nbytes = item.nbytes
            if nbytes > MAX_OBJECT_BYTES:
                why = f"object of {nbytes} bytes, a server takes at most {MAX_OBJECT_BYTES}"
                outcomes.append(Failed(why, "too_large"))
                continue
            name = self._name(item.key)
            head, tail = encode_set(name, nbytes, self._ttl_ms)
            commands.append(Command(name, (head, *item.buffers, tail), nbytes))
            outcomes.append(STORED)
        replies = iter(self._run(commands))
        return [_stored(next(replies)) if outcome is STORED else outcome for outcome in outcomes]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        names = [self._name(key) for key in keys]
        replies = self._run([Command(name, (encode(b"UNLINK", name),)) for name in names])
        self._insist(replies, "deleted")

    def list(self) -> Iterator[Entry]:
        seen: set[ObjectKey] = set()
        for node in self._nodes():
            with self._client(node) as client:
                for found in scan(client, self._config.prefix):
                    key = _parse(found.name[len(self._prefix) :])
                    if key is not None and key not in seen:
                        seen.add(key)
                        used_s = None if found.idle_s is None else time.time() - found.idle_s
                        yield Entry(key, found.nbytes, used_s)

    def usage(self) -> Usage | None:
        keys, limits = 0, []
        for node in self._nodes():
            with self._client(node) as client:
                keys += client.dbsize()
                limits.append(int(client.info("memory").get("maxmemory", 0)))
        if keys > MAX_COUNTED:
            return None
        sizes = [entry.nbytes for entry in self.list()]
        return Usage(sum(sizes), len(sizes), sum(limits) if all(limits) else None)

    def ping(self) -> None:
        command = Command(b"", (encode(b"PING"),))
        failures = []
        nodes = self._nodes()
        deadline = time.monotonic() + self._config.timeout
        for i, node in enumerate(nodes):
            now = time.monotonic()
            try:  # each is given an equal share of the time, for one may hang
                with node.connection(now + (deadline - now) / (len(nodes) - i)) as connection:
                    (reply,) = connection.pipeline([command])
            except (OSError, StorageError) as error:
                failures.append(f"{node}: {reason(error)}")
            else:
                if isinstance(reply, ReplyError):
                    failures.append(f"{node}: {reply.text}")
        if len(failures) == len(nodes):
            raise StorageError("; ".join(failures))
        for failure in failures:
            self._log.warning("a node of the cluster does not answer: %s", failure)

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _make_topology(self) -> Topology:
        config, address = self._config, self._config.address
        settings = Settings(
            login=self._login,
            database=self._database,
            tls=_tls(config) if address.tls else None,
            connect_timeout_s=config.connect_timeout,
            passive=self._passive,
        )
        self._login.password()  # a variable or a file that is not there shows now
        login = self._login

        def make(endpoint: Endpoint) -> Node:
            return Node(endpoint, settings, config.connections)

        if config.cluster:
            return Cluster(address.endpoints, login, self._control, make)
        if config.sentinel_master is not None:
            sentinels = sentinel_login(config)
            sentinels.password()
            return Sentinel(config.sentinel_master, address.endpoints, sentinels, self._control, make)
        return Single(make(address.endpoints[0]))

    def _probe(self, topology: Topology) -> ReplyError | None:
        """Read a key that is not there; the refusal, if there is one."""
        deadline = time.monotonic() + self._config.timeout
        name = self._prefix + b"probe"
        (node,) = topology.route([name], deadline)
        if node is None:
            raise ConnectionError("no node of the cluster has its slot")
        probes = [Command(name, (encode(b"EXISTS", name),)), Command(name, (encode(b"GET", name),), room=())]
        with node.connection(deadline) as connection:
            replies = list(connection.pipeline(probes))
        return next((reply for reply in replies if isinstance(reply, ReplyError)), None)

    def _nodes(self) -> Sequence[Node]:
        if self._topology is None:
            raise StorageError("the storage is not open")
        try:
            return self._topology.nodes(time.monotonic() + self._config.timeout)
        except OSError as error:
            raise StorageError(f"no server answers: {reason(error)}") from error

    @contextmanager
    def _client(self, node: Node) -> "Iterator[redis.Redis]":
        try:
            with self._control.client(node.endpoint, self._login, database=self._database) as client:
                yield client
        except OSError as error:
            raise StorageError(f"{node} does not answer: {reason(error)}") from error

    def _run(self, commands: Sequence[Command]) -> Sequence[Reply | Failed]:
        if self._router is None:
            raise StorageError("the storage is not open")
        return self._router.run(commands)

    def _name(self, key: ObjectKey) -> bytes:
        return self._prefix + key.name.encode()

    def _insist(self, replies: Sequence[Reply | Failed], what: str) -> None:
        """Raise when not one command was carried out; when the store is only examined, also when some were not."""
        bad = [reply for reply in replies if isinstance(reply, Failed | ReplyError)]
        if not bad:
            return
        why = bad[0].reason if isinstance(bad[0], Failed) else _explain(bad[0])
        text = f"{len(bad)} of {len(replies)} objects cannot be {what}: {why}"
        if len(bad) == len(replies) or self._passive:
            raise StorageError(text)
        self._log.debug("%s", text)


def _loaded(item: Item, reply: Reply | Failed) -> LoadOutcome:
    if reply is None:
        return MISSING
    if isinstance(reply, int):
        if reply > item.nbytes:
            return Failed(f"object of {reply} bytes, room for {item.nbytes}", "too_large")
        return Loaded(reply)
    if isinstance(reply, Failed):
        return reply
    if isinstance(reply, ReplyError):
        # something else under our name: the core deletes what is corrupt
        return Failed(_explain(reply), "corrupt" if reply.code == "WRONGTYPE" else "io")
    return Failed(f"the server answers {reply!r} to GET")


def _stored(reply: Reply | Failed) -> StoreOutcome:
    if reply == b"OK":
        return STORED
    if isinstance(reply, Failed):
        return reply
    if isinstance(reply, ReplyError):
        return Failed(_explain(reply), _REFUSED_STORES.get(reply.code, "io"))
    return Failed(f"the server answers {reply!r} to SET")


def _explain(refusal: ReplyError) -> str:
    """The server's words, and the next step where there is one."""
    steps = {
        "OOM": "raise its maxmemory, or set its maxmemory-policy to allkeys-lru",
        "NOPERM": "give the ACL user +get +set +exists +unlink on the keys of `prefix`",
        "NOAUTH": "give `password_env` or `password_file`, and `username` where it is not `default`",
        "MOVED": "it is a node of a cluster: set `cluster: true`",
        "READONLY": "it is a replica: name the master, or the Sentinels with `sentinel_master`",
    }
    step = steps.get(refusal.code)
    return f"{refusal.text}: {step}" if step else refusal.text


def _parse(name: bytes) -> ObjectKey | None:
    try:
        return ObjectKey.from_name(name.decode())
    except ValueError:
        return None


def _tls(config: RedisConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca.expanduser() if config.tls_ca else None)
        if config.tls_cert is not None:
            context.load_cert_chain(
                config.tls_cert.expanduser(), config.tls_key.expanduser() if config.tls_key else None
            )
    except (OSError, ValueError) as error:
        text = f"`tls_ca`, `tls_cert` or `tls_key` cannot be used ({reason(error)}): give PEM files"
        raise StorageError(text) from error
    context.check_hostname = config.tls_verify == "full"
    if config.tls_verify == "off":
        context.verify_mode = ssl.CERT_NONE
    return context
