"""Uploads in parts that came to nothing: what was sent is invisible, yet kept and paid for until they are aborted."""

import datetime
import logging
import threading
from collections import deque
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from kvcore_s3.names import Names

ABANDONED_S = 24 * 3600.0
"""An upload begun so long ago has no owner any more: a store has a deadline of seconds."""


class Uploads:
    """Aborts what this process gave up, and what killed ones left behind."""

    def __init__(self, client: Any, bucket: str, names: Names, log: logging.Logger) -> None:
        self._client = client
        self._bucket = bucket
        self._names = names
        self._log = log
        self._lock = threading.Lock()
        self._given_up: deque[tuple[str, str]] = deque()

    def give_up(self, name: str, upload_id: str) -> None:
        """Remember an upload that failed; `abort` ends it."""
        with self._lock:
            self._given_up.append((name, upload_id))

    @property
    def pending(self) -> bool:
        """Something waits for `abort`."""
        return bool(self._given_up)

    def abort(self) -> None:
        """Abort what was given up. What the server does not take now waits for the next time. Never raises."""
        while True:
            with self._lock:
                if not self._given_up:
                    return
                name, upload_id = self._given_up.popleft()
            try:
                self._abort(name, upload_id)
            except (ClientError, BotoCoreError) as error:
                self._log.debug("the upload of %s is not aborted yet: %s", name, error)
                self.give_up(name, upload_id)
                return

    def abort_leftovers(self) -> None:
        """Abort what killed processes left. Never raises: the bucket's own rules may do it, too."""
        try:
            page = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._names.root)
            now = datetime.datetime.now(datetime.UTC)
            for upload in page.get("Uploads", ()):
                begun = datetime.datetime.fromisoformat(str(upload["Initiated"]))
                old = (now - begun).total_seconds() > ABANDONED_S
                if old and self._names.key(upload["Key"]) is not None:
                    self._abort(upload["Key"], upload["UploadId"])
                    self._log.info("aborted an upload of %s that was left behind", upload["Key"])
        except (ClientError, BotoCoreError, ValueError, TypeError) as error:
            self._log.debug("s3://%s: uploads that were left behind are not aborted: %s", self._bucket, error)

    def _abort(self, name: str, upload_id: str) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload_id)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "NoSuchUpload":  # someone else has
                raise
