"""What can go wrong with a request, in words: what it was, what the server said, and what to do about it."""

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import HTTPError, IncompleteRead, NewConnectionError
from urllib3.exceptions import TimeoutError as Urllib3Timeout

from kvcore.api import Failed

_RETRY_STATUS = {408, 429, 500, 502, 503, 504}
_RETRY_CODES = {"RequestTimeout", "SlowDown", "Throttling", "InternalError", "OperationAborted"}
_OVERLOAD = {429, 503}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage"}
_TOO_LARGE = {"EntityTooLarge"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_WRITES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}

_PERMISSIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "DeleteObjects": "s3:DeleteObject",
    "CreateBucket": "s3:CreateBucket",
    **dict.fromkeys(_WRITES, "s3:PutObject"),
}
CREDENTIALS = "check `access_key_id` and `secret_access_key`, `profile`, or the AWS_* variables of this process"
_REGION = "set `region` to the bucket's"
_HINTS = {
    "NoSuchBucket": "make the bucket, set `create_bucket: true`, or correct `bucket`, `endpoint` and `region`",
    "InvalidBucketName": "correct `bucket`",
    "SignatureDoesNotMatch": f"the secret key is wrong: {CREDENTIALS}",
    "InvalidAccessKeyId": f"there is no such access key here: {CREDENTIALS}, and `endpoint`",
    "ExpiredToken": "the temporary keys have run out: get new ones, or use a source that renews them",
    "InvalidToken": f"the session token is wrong: {CREDENTIALS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "this server does not do what was asked: set `encryption: none`, or see its documentation",
    "KMS.NotFoundException": "correct `kms_key_id`",
}
_BY_CONFIG = frozenset(_HINTS)  # no other request of the call will fare better


class CutShort(Exception):
    """A response ended before its object did."""


class Fault(Exception):
    """Why a request came to nothing.

    Args:
        reason: for people.
        kind: as of `Failed`.
        code: the server's word for it, or the exception's name.
        status: of HTTP; 0 when there was no answer.
        retry: another attempt may succeed.
        down: it says something about the server, not about this object, so that no other request of the call is worth
            its time.
    """

    def __init__(
        self,
        reason: str,
        kind: str = "io",
        *,
        code: str = "",
        status: int = 0,
        retry: bool = False,
        down: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.code = code
        self.status = status
        self.retry = retry
        self.down = down

    def again(self) -> "Fault":
        """The same for another request of the call: without the frames that the first one holds on to."""
        return Fault(self.reason, self.kind, code=self.code, status=self.status, retry=self.retry, down=self.down)

    @property
    def missing(self) -> bool:
        """There is no such object. (A HEAD has no body: it says so also when there is no such bucket.)"""
        return self.status == 404 and self.code in ("NoSuchKey", "404")

    @property
    def passing(self) -> bool:
        """It may be over by itself: the server does not answer, or not well."""
        return self.retry or self.kind == "timeout"

    @property
    def outcome(self) -> Failed:
        """The same for the core."""
        return Failed(self.reason, self.kind)


class Changed(Fault):
    """The object is no longer the one whose first part was read."""

    def __init__(self) -> None:
        super().__init__("the object was overwritten while it was read", code="Changed")


def fault_of(error: Exception, place: str) -> Fault:
    """What `error`, raised by boto3, botocore or urllib3, means. `place` names the object and the endpoint."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, ClientError):
        about, meta = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        return answered(
            place,
            error.operation_name,
            int(meta.get("HTTPStatusCode", 0)),
            str(about.get("Code", "")),
            about.get("Message"),
            meta.get("HTTPHeaders", {}),
        )
    name = type(error).__name__
    text = f"{place}: {str(error).rstrip('.') or name}"
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return Fault(f"{text}: {CREDENTIALS}", code="NoCredentials", down=True)
    if "certificate" in str(error).lower():
        hint = "set `ca_bundle` to the certificates that signed the server's, or correct `endpoint`"
        return Fault(f"{text}: {hint}", code="Certificate", down=True)
    if "WRONG_VERSION_NUMBER" in str(error):  # its first bytes were no TLS
        return Fault(f"{text}: it does not speak TLS: use http:// in `endpoint`", code="NoTLS", down=True)
    if isinstance(error, ConnectionClosedError):
        return Fault(f"{text}: has it just ended, or is it no S3 endpoint?", code=name, retry=True, down=True)
    late = isinstance(error, ConnectTimeoutError | ReadTimeoutError | Urllib3Timeout | TimeoutError)
    if late and not isinstance(error, NewConnectionError):
        return Fault(text, "timeout", code=name, retry=True, down=True)
    if isinstance(error, CutShort | IncompleteRead):
        return Fault(text, code=name, retry=True)
    if isinstance(error, BotoConnectionError | HTTPClientError | HTTPError | OSError):
        return Fault(text, code=name, retry=True, down=True)
    return Fault(text, code=name, down=isinstance(error, BotoCoreError))


def answered(
    place: str, operation: str, status: int, code: str, message: str | None, headers: Mapping[str, Any]
) -> Fault:
    """The server has answered, with an error."""
    said = f"{status} {code}" if code != str(status) else code
    text = f"{place}: {operation}: {said}" + (f" ({message.rstrip('.')})" if message and message != code else "")
    if hint := _hint(code, operation, headers.get("x-amz-bucket-region")):
        text = f"{text}: {hint}"
    kind = "io"
    if code in _FULL or status == 507:
        kind = "full"
    elif code in _TOO_LARGE:
        kind = "too_large"
    elif code in _DENIED and operation in _WRITES:
        kind = "read_only"
    retry = status in _RETRY_STATUS or code in _RETRY_CODES
    return Fault(text, kind, code=code, status=status, retry=retry, down=code in _BY_CONFIG or status in _OVERLOAD)


def _hint(code: str, operation: str, region: str | None) -> str | None:
    if code in _DENIED:
        hint = f"these credentials lack {_PERMISSIONS.get(operation, 'the permission')}"
        if operation in ("GetObject", "HeadObject"):
            hint += " (or s3:ListBucket, without which S3 answers so for an object that is not there)"
        if code != "AccessDenied":  # a HEAD has no body that could tell
            hint += ", or are wrong"
        return hint
    if code == "404" and operation == "ListObjectsV2":  # S3 would say what is missing
        return "is it an S3 endpoint?"
    known = _HINTS.get(code)
    return f"{known}, `{region}`" if known is _REGION and region else known
