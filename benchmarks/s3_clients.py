"""kvcore-s3 beside other S3 clients: boto3 on threads, the CRT client that boto3 can use, obstore. One JSON row a line.

    pip install awscrt obstore
    python benchmarks/s3_clients.py [--mib 4] [--count 32] [--jobs 8] [--rounds 6] [--endpoint URL --bucket B]

Each side puts and gets the same objects with as many requests at once, against a JuiceFS gateway that is started here,
or a server of yours (keys from the environment). They take turns, each round in another order, and the first round is
dropped. Rates are medians in MiB/s; a ratio is the median over the rounds of ours by the other, `ratio` the one by
whoever is fastest. `cpu_ms` is what the client's process computes per object: an engine shares it.

Everyone gets the bytes where they belong, in memory of the caller: kvcore and boto3 with `readinto`, the CRT by a copy
of each chunk, obstore and boto3's `read()` by a copy of the object. `native_*` is what the client gives by itself, in
memory of its own. Puts are from one piece for the others; ours has the header in a page of its own, as the core gives
it. Nobody signs payloads or makes checksums. Ends with an error when an object comes back changed.
"""

import argparse
import io
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import obstore
from awscrt import auth, http, s3
from awscrt import io as crt_io
from botocore.config import Config
from obstore.store import S3Store

from kvcore.api import Context, Item, Loaded, ObjectKey, Stored
from kvcore.testing import aligned
from kvcore.testing.servers.s3 import ACCESS_KEY, SECRET_KEY, JuiceFS
from kvcore_s3.config import S3Config
from kvcore_s3.storage import S3Storage

BUDGET = 0.9
HEADER_BYTES = 4096
REGION = "us-east-1"


class Place(NamedTuple):
    """Where, and how much."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    nbytes: int
    count: int
    jobs: int


def main() -> None:
    parser = argparse.ArgumentParser(description="kvcore-s3 beside other S3 clients.")
    parser.add_argument("--mib", type=int, default=4, help="size of an object")
    parser.add_argument("--count", type=int, default=32, help="objects of a sample")
    parser.add_argument("--jobs", type=int, default=8, help="requests at once")
    parser.add_argument("--rounds", type=int, default=6, help="rounds after one that is dropped")
    parser.add_argument("--endpoint", help="a server other than the one that is started here")
    parser.add_argument("--bucket", default="benchmark", help="its bucket, which must exist")
    args = parser.parse_args()
    size = (args.mib << 20, args.count, args.jobs)
    with ExitStack() as stack:
        if args.endpoint:
            keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
            place = Place(args.endpoint, args.bucket, *keys, *size)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(JuiceFS(Path(folder)))
            place = Place(server.endpoint, args.bucket, ACCESS_KEY, SECRET_KEY, *size)
            client(place).create_bucket(Bucket=args.bucket)
        compare(place, args.rounds)


def compare(place: Place, rounds: int) -> None:
    """Both rows."""
    sides: list[Side] = [Ours(place), Boto3(place), Boto3Read(place), Crt(place), Obstore(place)]
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(rounds + 1):
        order = sides[round_ % len(sides) :] + sides[: round_ % len(sides)]
        for what in ("put", "get", "native_get"):
            for side in order:
                call = getattr(side, what, None)
                if call is not None:
                    sample = measure(side, call, what, round_)
                    samples.setdefault((side.name, what), []).append(sample)
    for side in sides:
        side.close()
    for op in ("put", "get"):
        print(json.dumps(row(place, op, {k: v[1:] for k, v in samples.items()})), flush=True)


def measure(side: "Side", call: Callable[[], None], what: str, round_: int) -> tuple[float, float]:
    """MiB/s, and milliseconds of CPU per object; what was put is checked when it is got."""
    side.mark(round_ if what == "put" else None)
    begun, cpu = time.perf_counter(), time.process_time()
    call()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if what == "get":
        side.check(round_)
    return side.place.count * side.place.nbytes / (1 << 20) / seconds, cpu / side.place.count * 1e3


def row(place: Place, op: str, samples: dict[tuple[str, str], list[tuple[float, float]]]) -> dict[str, Any]:
    """The result of `put` or `get`."""
    rates = {name: [rate for rate, _ in found] for (name, what), found in samples.items() if what == op}
    native = {name: [rate for rate, _ in found] for (name, what), found in samples.items() if what == f"native_{op}"}
    cpu = {name: statistics.median(c for _, c in found) for (name, what), found in samples.items() if what == op}
    ours = rates.pop("kvcore")
    by = {name: statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) for name, theirs in rates.items()}
    fastest = max(rates, key=lambda name: statistics.median(rates[name]))
    return {
        "name": f"s3.{op}",
        "object_mib": place.nbytes >> 20,
        "jobs": place.jobs,
        "value": round(statistics.median(ours)),
        **{name: round(statistics.median(theirs)) for name, theirs in rates.items()},
        **{f"native_{name}": round(statistics.median(theirs)) for name, theirs in native.items()},
        "unit": "MiB/s",
        "cpu_ms": {name: round(value, 2) for name, value in cpu.items()},
        **{f"ratio_{name}": round(value, 3) for name, value in by.items()},
        "fastest": fastest,
        "ratio": round(by[fastest], 3),
        "budget": BUDGET,
        "met": by[fastest] >= BUDGET,
    }


class Side:
    """One client: `put` and `get` move all objects, from one piece of memory and into another per job."""

    name = ""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.names = [f"{self.name}-{i}" for i in range(place.count)]
        self.source = aligned(place.nbytes)
        self.source[:] = os.urandom(1 << 20) * (place.nbytes >> 20)
        self.targets = [aligned(place.nbytes) for _ in range(place.count)]
        for target in self.targets:
            target[:] = bytes(place.nbytes)  # every page is there
        self.pool = ThreadPoolExecutor(place.jobs)

    def close(self) -> None:
        """Let go of threads and connections."""
        self.pool.shutdown()

    def mark(self, round_: int | None) -> None:
        """Give what is put a mark to find again; before a get, take it away from where it goes."""
        if round_ is not None:
            self.source[-8:] = round_.to_bytes(8, "little")
            self.prepare()
        else:
            for target in self.targets:
                target[-8:] = bytes(8)

    def prepare(self) -> None:
        """Make what the client wants to be given, outside the time."""

    def check(self, round_: int) -> None:
        """All is there again."""
        if any(target[-8:] != round_.to_bytes(8, "little") or target != self.source for target in self.targets):
            raise SystemExit(f"{self.name}: an object came back changed")

    def all(self, one: Callable[[int], object]) -> None:
        """`one` of each object, on as many threads as there are jobs."""
        list(self.pool.map(one, range(self.place.count)))


class Ours(Side):
    """The storage, as the core calls it."""

    name = "kvcore"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        given = {"endpoint": place.endpoint, "bucket": place.bucket, "access_key_id": place.access_key}
        more = {"secret_access_key": place.secret_key, "concurrency": place.jobs, "sign_payload": "never"}
        options = {**given, **more, "deadline": "60s", "region": REGION}
        self.storage = S3Storage(S3Config.model_validate(options), Context())
        self.storage.open()
        keys = [ObjectKey(b"benchmark".ljust(16), os.urandom(32)) for _ in range(place.count)]
        cut = (slice(None, HEADER_BYTES), slice(HEADER_BYTES, None))
        self.stored = [Item(key, [self.source[part] for part in cut]) for key in keys]
        self.loaded = [Item(k, [t[part] for part in cut]) for k, t in zip(keys, self.targets, strict=True)]

    def put(self) -> None:
        if not all(isinstance(o, Stored) for o in self.storage.store(self.stored)):
            raise SystemExit("kvcore: a store failed")

    def get(self) -> None:
        if not all(isinstance(o, Loaded) for o in self.storage.load(self.loaded)):
            raise SystemExit("kvcore: a load failed")

    def close(self) -> None:
        self.storage.close()
        super().close()


class Boto3(Side):
    """boto3 set up as well as it can be, its answers read into place."""

    name = "boto3"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.client = client(place)
        self.body = b""

    def prepare(self) -> None:
        self.body = bytes(self.source)

    def put(self) -> None:
        where = self.place.bucket
        self.all(lambda i: self.client.put_object(Bucket=where, Key=self.names[i], Body=self.body))

    def get(self) -> None:
        self.all(self._get)

    def _get(self, i: int) -> None:
        body, at = self.client.get_object(Bucket=self.place.bucket, Key=self.names[i])["Body"], 0
        while at < self.place.nbytes:
            at += body.readinto(self.targets[i][at:])


class Boto3Read(Boto3):
    """The same, with `read()`."""

    name = "boto3_read"

    def native_get(self) -> None:
        where = self.place.bucket
        self.all(lambda i: len(self.client.get_object(Bucket=where, Key=self.names[i])["Body"].read()))

    def _get(self, i: int) -> None:
        self.targets[i][:] = self.client.get_object(Bucket=self.place.bucket, Key=self.names[i])["Body"].read()


class Crt(Side):
    """The client that boto3 uses with `awscrt`, all requests handed over at once or as many as there are jobs."""

    name = "crt"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        loop = crt_io.EventLoopGroup()
        bootstrap = crt_io.ClientBootstrap(loop, crt_io.DefaultHostResolver(loop))
        keys = auth.AwsCredentialsProvider.new_static(place.access_key, place.secret_key)
        signing = s3.create_default_s3_signing_config(region=REGION, credential_provider=keys)
        self.client = s3.S3Client(
            bootstrap=bootstrap,
            region=REGION,
            signing_config=signing,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
            part_size=max(8 << 20, place.nbytes),
            throughput_target_gbps=10,
        )
        self.slots = threading.Semaphore(place.jobs)

    def prepare(self) -> None:
        self.body = bytes(self.source)

    def put(self) -> None:
        self._run(lambda i: self._ask("PUT", i, self.body), s3.S3RequestType.PUT_OBJECT)

    def get(self) -> None:
        self._run(lambda i: self._ask("GET", i), s3.S3RequestType.GET_OBJECT)

    def _run(self, ask: Callable[[int], http.HttpRequest], kind: s3.S3RequestType) -> None:
        futures = []
        for i in range(self.place.count):
            self.slots.acquire()
            target = self.targets[i]

            def body(chunk: bytes, offset: int, target: memoryview = target, **_: object) -> None:
                target[offset : offset + len(chunk)] = chunk

            future = self.client.make_request(type=kind, request=ask(i), on_body=body).finished_future
            future.add_done_callback(lambda _: self.slots.release())
            futures.append(future)
        for future in futures:
            future.result(60)

    def _ask(self, method: str, i: int, body: bytes | None = None) -> http.HttpRequest:
        headers = http.HttpHeaders([("host", self.place.endpoint.partition("//")[2])])
        if body is not None:
            headers.add("content-length", str(len(body)))
        stream = io.BytesIO(body) if body is not None else None
        return http.HttpRequest(method, f"/{self.place.bucket}/{self.names[i]}", headers, stream)


class Obstore(Side):
    """obstore on threads; its answers are copied into place."""

    name = "obstore"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.store = S3Store(
            place.bucket,
            endpoint=place.endpoint,
            access_key_id=place.access_key,
            secret_access_key=place.secret_key,
            region=REGION,
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
            unsigned_payload=True,
        )

    def prepare(self) -> None:
        self.body = bytes(self.source)

    def put(self) -> None:
        self.all(lambda i: obstore.put(self.store, self.names[i], self.body, use_multipart=False))

    def native_get(self) -> None:
        self.all(lambda i: len(obstore.get(self.store, self.names[i]).bytes()))

    def get(self) -> None:
        def one(i: int) -> None:
            self.targets[i][:] = memoryview(obstore.get(self.store, self.names[i]).bytes())

        self.all(one)


def client(place: Place) -> Any:
    """boto3's, without payload signatures, checksums and retries."""
    return boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        region_name=REGION,
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        config=Config(
            max_pool_connections=2 * place.jobs,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        ),
    )


if __name__ == "__main__":
    main()
