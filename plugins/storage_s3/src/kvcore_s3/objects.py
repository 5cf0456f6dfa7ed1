"""Single objects: read into the caller's buffers, written from them; large ones in parts, several at once."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from urllib3 import BaseHTTPResponse

from kvcore.api import MISSING, Failed, Loaded, LoadOutcome
from kvcore_s3.call import Call
from kvcore_s3.faults import Changed, CutShort, Fault
from kvcore_s3.streams import Body, part, receive
from kvcore_s3.uploads import Uploads
from kvcore_s3.wire import Wire
from kvcore_s3.workers import Workers

_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}
VERSIONS = 3
"""How often the parts of an object are begun anew because it was overwritten meanwhile; then it is read as a whole."""


class Objects:
    """The objects of one bucket.

    Args:
        part_bytes: larger ones go in parts of this size.
        encryption: what goes with each upload, as boto3 names it.
    """

    def __init__(
        self,
        client: Any,
        wire: Wire,
        bucket: str,
        workers: Workers,
        uploads: Uploads,
        *,
        part_bytes: int,
        encryption: Mapping[str, str],
    ) -> None:
        self._client = client
        self._wire = wire
        self._bucket = bucket
        self._workers = workers
        self._uploads = uploads
        self._part_bytes = part_bytes
        self._encryption = encryption
        self._headers = {_HEADERS[name]: value for name, value in encryption.items()}

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, call: Call, name: str, buffers: Sequence[memoryview]) -> LoadOutcome:
        """Read an object into `buffers` from the front."""
        room = sum(map(len, buffers))
        try:
            if room > self._part_bytes:
                for _ in range(VERSIONS):
                    try:
                        outcome = self._get_parts(call, name, buffers, room)
                    except Changed:
                        continue
                    if outcome is not None:
                        return outcome
                    break
            return call.attempt(lambda: self._get_whole(call, name, buffers, room), name)
        except Fault as fault:
            return MISSING if fault.missing else fault.outcome

    def _get_whole(self, call: Call, name: str, buffers: Sequence[memoryview], room: int) -> LoadOutcome:
        with closing(self._wire.send(call, "GET", name)) as response:  # read to its end, it keeps its connection
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise CutShort("the answer does not say how long the object is")
            nbytes = int(length)
            if nbytes > room:
                return _too_large(name, nbytes, room)
            receive(response, part(buffers, 0, nbytes), call, name)
        return Loaded(nbytes)

    def _get_parts(self, call: Call, name: str, buffers: Sequence[memoryview], room: int) -> LoadOutcome | None:
        """The first part tells the size and the version; the others are asked for in that version only.

        None: this object cannot be had in parts. Raises `Changed` when it was overwritten meanwhile.
        """
        try:
            first = call.attempt(lambda: self._ask(call, name, 0), name)
        except Changed:  # an empty object has no parts
            return None
        opened = [first]
        try:
            nbytes, version = _size(first), first.headers.get("ETag")
            if nbytes is None or not version:  # a server that knows no ranges, or no versions
                return None
            if nbytes > room:
                return _too_large(name, nbytes, room)

            def fetch(offset: int) -> None:
                call.attempt(lambda: read(offset), name)

            def read(offset: int) -> None:
                response = opened.pop() if offset == 0 and opened else self._ask(call, name, offset, version)
                with closing(response):
                    if _size(response) != nbytes:
                        raise Changed
                    receive(response, part(buffers, offset, min(self._part_bytes, nbytes - offset)), call, name)

            self._workers.run(fetch, range(0, nbytes, self._part_bytes))
        finally:
            for response in opened:
                response.close()
        return Loaded(nbytes)

    def _ask(self, call: Call, name: str, offset: int, version: str | None = None) -> BaseHTTPResponse:
        """The response to a request for the part at `offset`. Raises `Changed` when there is none in this version."""
        headers = {"Range": f"bytes={offset}-{offset + self._part_bytes - 1}"}
        if version is not None:
            headers["If-Match"] = version
        try:
            return self._wire.send(call, "GET", name, headers=headers)
        except Fault as fault:
            if fault.status in (412, 416):  # an object that became shorter, or an empty one, which has no ranges
                raise Changed from None
            raise

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, call: Call, name: str, buffers: Sequence[memoryview]) -> None:
        """Write an object, whole or not at all. Raises `Fault`."""
        nbytes = sum(map(len, buffers))
        if nbytes > self._part_bytes:
            self._put_parts(call, name, buffers, nbytes)
        else:
            send, headers, check = self._wire.send, self._headers, partial(call.check_time, name)
            call.attempt(lambda: send(call, "PUT", name, headers=headers, body=Body(buffers, check)), name)

    def _put_parts(self, call: Call, name: str, buffers: Sequence[memoryview], nbytes: int) -> None:
        where = {"Bucket": self._bucket, "Key": name}
        upload_id = call.ask(self._client.create_multipart_upload, **where, **self._encryption)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            piece = part(buffers, (number - 1) * self._part_bytes, self._part_bytes)
            query = {"partNumber": str(number), "uploadId": upload_id}
            check = partial(call.check_time, name)
            sent = call.attempt(lambda: self._wire.send(call, "PUT", name, query=query, body=Body(piece, check)), name)
            return {"PartNumber": number, "ETag": sent.headers["ETag"]}

        try:
            sent = self._workers.run(send, range(1, -(-nbytes // self._part_bytes) + 1))
            complete = self._client.complete_multipart_upload
            call.ask(complete, **where, UploadId=upload_id, MultipartUpload={"Parts": sent})
        except BaseException:
            self._uploads.give_up(name, upload_id)
            self._workers.begin(self._uploads.abort)
            raise


def _too_large(name: str, nbytes: int, room: int) -> Failed:
    return Failed(f"{name} has {nbytes} bytes, room for {room}", "too_large")


def _size(response: BaseHTTPResponse) -> int | None:
    """The size of the whole object, from the response to a request for a part; None when it is not one."""
    first, _, total = response.headers.get("Content-Range", "").rpartition("/")
    return int(total) if first and total.isdecimal() else None
