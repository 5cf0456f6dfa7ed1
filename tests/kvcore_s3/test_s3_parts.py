"""The pure parts: what answers mean that no server here gives, bodies, the sharing of work, and AWS's own addresses."""

import threading
import time

import pytest
from botocore.exceptions import ClientError

from kvcore.testing.memory import content
from kvcore_s3.call import ATTEMPTS, Call, Limits
from kvcore_s3.client import connect
from kvcore_s3.config import S3Config
from kvcore_s3.faults import Fault, fault_of
from kvcore_s3.streams import Body, part
from kvcore_s3.workers import Workers

PLACE = "s3://b/k at https://s3.example.com"

# operation, status, code -> kind, whether it is tried again, whether it is about the server, words of the hint
ANSWERS = {
    ("GetObject", 503, "SlowDown"): ("io", True, True, ""),
    ("GetObject", 500, "InternalError"): ("io", True, False, ""),
    ("PutObject", 400, "RequestTimeout"): ("io", True, False, ""),
    ("PutObject", 400, "EntityTooLarge"): ("too_large", False, False, ""),
    ("PutObject", 507, "InsufficientStorage"): ("full", False, False, ""),
    ("UploadPart", 403, "QuotaExceeded"): ("full", False, False, ""),
    ("CompleteMultipartUpload", 403, "AccessDenied"): ("read_only", False, False, "s3:PutObject"),
    ("GetObject", 403, "ExpiredToken"): ("io", False, True, "have run out"),
    ("GetObject", 403, "RequestTimeTooSkewed"): ("io", False, True, "clock"),
    ("PutObject", 400, "KMS.NotFoundException"): ("io", False, True, "`kms_key_id`"),
    ("ListObjectsV2", 301, "PermanentRedirect"): ("io", False, True, "set `region` to the bucket's, `eu-west-3`"),
    ("ListObjectsV2", 403, "AccessDenied"): ("io", False, False, "s3:ListBucket"),
    ("PutObject", 501, "NotImplemented"): ("io", False, True, "encryption: none"),
}


@pytest.mark.parametrize(("answer", "meaning"), ANSWERS.items(), ids=[code for _, _, code in ANSWERS])
def test_what_answers_mean(answer: tuple[str, int, str], meaning: tuple[str, bool, bool, str]) -> None:
    operation, status, code = answer
    kind, retry, down, hint = meaning
    response = {
        "Error": {"Code": code, "Message": "Words of the server."},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {"x-amz-bucket-region": "eu-west-3"}},
    }
    fault = fault_of(ClientError(response, operation), PLACE)  # type: ignore[arg-type]
    assert (fault.kind, fault.retry, fault.down) == (kind, retry, down)
    assert not fault.missing
    assert fault.reason.startswith(f"{PLACE}: {operation}: {status} {code} (Words of the server)")
    assert hint in fault.reason


def test_a_bug_is_a_fault_of_one_object() -> None:
    fault = fault_of(KeyError("ETag"), PLACE)
    assert (fault.kind, fault.retry, fault.down) == ("io", False, False)


def limits(deadline_s: float = 5.0) -> Limits:
    return Limits("s3://b/{} at https://s3.example.com", deadline_s, 0.1, 0.1, threading.Semaphore(2))


def test_attempts_end_and_stop_the_others() -> None:
    """After the last one of a server that is down, nothing else of the call is tried."""
    call, tried = Call(limits()), 0

    def request() -> None:
        nonlocal tried
        tried += 1
        raise ConnectionRefusedError("refused")

    for name in ("a", "b"):
        with pytest.raises(Fault, match="s3://b/a at"):
            call.attempt(request, name)
    assert tried == ATTEMPTS
    assert Call(limits()).attempt(lambda: "well", "a") == "well"


def test_no_attempt_begins_without_time() -> None:
    call = Call(limits(0.05))
    time.sleep(0.06)
    with pytest.raises(Fault, match=r"`deadline` of 0\.05 s") as caught:
        call.attempt(lambda: pytest.fail("it was begun"), "a")
    assert caught.value.kind == "timeout"
    with pytest.raises(Fault, match="`deadline`"):  # it may take 0.2 s, which cannot be told to boto3
        Call(limits(0.15)).ask(lambda: pytest.fail("it was begun"))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (4096, 10_000), (3, 0, 7, 0), (0, 5)])
def test_a_body_is_a_file(sizes: tuple[int, ...]) -> None:
    data = content(sizes, sum(sizes))
    view, buffers, at = memoryview(data), [], 0
    for size in sizes:
        buffers.append(view[at : at + size])
        at += size
    body = Body(buffers)
    assert len(body) == len(data)
    assert body.seek(0, 2) == len(data)
    assert bytes(body.read(10)) == b""
    for step in (1, 2, 4095, 1 << 20, None):
        assert body.seek(0) == 0
        pieces = []
        while len(piece := body.read(step)):
            assert step is None or len(piece) <= step  # whoever reads has room for no more
            pieces.append(bytes(piece))
        assert b"".join(pieces) == data
        assert body.tell() == len(data)
    for offset in (0, 1, 4096, len(data)):
        assert b"".join(part(buffers, offset, 5000)) == data[offset : offset + 5000]


def test_work_is_shared_and_the_first_error_is_raised() -> None:
    """The caller works along, the rest is not begun after an error, and what is under way ends first."""
    workers, done = Workers("test-workers", 4), []

    def work(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        time.sleep(0.01)
        done.append(number)
        return number * 2

    assert workers.run(work, range(5)) == [0, 2, 4, 6, 8]
    assert workers.run(work, []) == []
    with pytest.raises(ValueError, match="five"):
        workers.run(work, [5, *range(100, 200)])
    assert len([number for number in done if number >= 100]) < 20
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count
    nested = workers.run(lambda n: sum(workers.run(work, [n] * 3)), range(4))
    assert nested == [0, 6, 12, 18]
    workers.close()
    assert workers.run(work, range(3)) == [0, 2, 4]  # closed: the caller alone


def test_a_system_without_a_thread_to_give_leaves_it_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers("test-workers", 4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            assert workers.run(lambda n: n, range(8)) == list(range(8))
            workers.begin(lambda: None)
    together = threading.Barrier(4)  # afterwards there are as many as ever
    workers.run(lambda n: together.wait(10), range(4))
    workers.close()


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({"region": "eu-west-3"}, "https://kv-cache.s3.eu-west-3.amazonaws.com/"),
        ({}, "https://kv-cache.s3.amazonaws.com/"),
        ({"region": "eu-west-3", "addressing": "path"}, "https://s3.eu-west-3.amazonaws.com/kv-cache/"),
        ({"endpoint": "https://s3.example.com:9000"}, "https://s3.example.com:9000/kv-cache/"),
        (
            {"endpoint": "http://s3.example.com/root/", "addressing": "virtual"},
            "http://kv-cache.s3.example.com/root/",
        ),
    ],
)
def test_objects_go_where_boto3_would_send_them(options: dict[str, str], address: str) -> None:
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    client, wire = connect(S3Config.model_validate({"bucket": "kv-cache", **keys, **options}))
    assert wire._address == address
    wire.close()
    client.close()
