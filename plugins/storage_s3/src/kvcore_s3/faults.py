"""What can go wrong with a request, in words: what it was, what the server said, and what to do about it."""

from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from kvcore.api import Failed

_RETRY_STATUS = {408, 429, 500, 502, 503, 504}
_RETRY_CODES = {"RequestTimeout", "SlowDown", "Throttling", "InternalError", "OperationAborted"}
_OVERLOAD = {429, 503}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage"}
_TOO_LARGE = {"EntityTooLarge", "EntityTooLargeError"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_WRITES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}

_PERMISSIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "DeleteObjects": "s3:DeleteObject",
    "CreateBucket": "s3:CreateBucket",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    **dict.fromkeys(_WRITES, "s3:PutObject"),
}
_CREDENTIALS = "check `access_key_id` and `secret_access_key`, `profile`, or the AWS_* variables of this process"
_REGION = "set `region` to the bucket's"
_HINTS = {
    "NoSuchBucket": "make the bucket, set `create_bucket: true`, or correct `bucket`, `endpoint` and `region`",
    "InvalidBucketName": "correct `bucket`",
    "SignatureDoesNotMatch": f"the secret key is wrong: {_CREDENTIALS}",
    "InvalidAccessKeyId": f"there is no such access key here: {_CREDENTIALS}, and `endpoint`",
    "ExpiredToken": "the temporary keys have run out: get new ones, or use a source that renews them",
    "InvalidToken": f"the session token is wrong: {_CREDENTIALS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NotImplemented": "this server does not do what was asked: set `encryption: none`, or see its documentation",
    "KMS.NotFoundException": "correct `kms_key_id`",
}
HOPELESS = frozenset(_HINTS)
"""Codes that say that the configuration is wrong."""


class CutShort(Exception):
    """A response ended before its object did."""


class Fault(Exception):
    """Why a request came to nothing.

    Args:
        reason: for people.
        kind: as of `Failed`.
        code: the server's word for it, or the exception's name.
        retry: another attempt may succeed.
        down: it says something about the server, not about this object, so that no other request of the call is worth
            its time.
    """

    def __init__(
        self, reason: str, kind: str = "io", *, code: str = "", retry: bool = False, down: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.code = code
        self.retry = retry
        self.down = down

    def again(self) -> "Fault":
        """The same for another request of the call: without the frames that the first one holds on to."""
        return Fault(self.reason, self.kind, code=self.code, retry=self.retry, down=self.down)

    @property
    def missing(self) -> bool:
        """There is no such object."""
        return self.code in ("NoSuchKey", "404", "NotFound")

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
    """What `error`, raised by boto3 or while a response was read, means. `place` names the object and the endpoint."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, ClientError):
        return _answered(error, place)
    text = f"{place}: {str(error).rstrip('.') or type(error).__name__}"
    name = type(error).__name__
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return Fault(f"{text}: {_CREDENTIALS}", code="NoCredentials", down=True)
    if isinstance(error, SSLError) and "certificate" in str(error).lower():
        hint = "set `ca_bundle` to the certificates that signed the server's, or correct `endpoint`"
        return Fault(f"{text}: {hint}", code="Certificate", down=True)
    if isinstance(error, ConnectTimeoutError | ReadTimeoutError | TimeoutError):
        return Fault(text, "timeout", code=name, retry=True, down=True)
    if isinstance(error, ResponseStreamingError | IncompleteReadError | CutShort):
        return Fault(text, code=name, retry=True)
    if isinstance(error, ConnectionError | HTTPClientError | OSError):
        return Fault(text, code=name, retry=True, down=True)
    return Fault(text, code=name, down=isinstance(error, BotoCoreError))


def _answered(error: ClientError, place: str) -> Fault:
    """The server has answered, with an error."""
    response: dict[str, Any] = error.response
    about = response.get("Error", {})
    code, message = str(about.get("Code", "")), about.get("Message")
    meta = response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    operation = error.operation_name
    said = f"{status} {code}" if code != str(status) else code
    text = f"{place}: {operation}: {said}" + (f" ({message.rstrip('.')})" if message and message != code else "")
    if hint := _hint(code, operation, meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or about.get("Region")):
        text = f"{text}: {hint}"
    kind = "io"
    if code in _FULL or status == 507:
        kind = "full"
    elif code in _TOO_LARGE:
        kind = "too_large"
    elif code in _DENIED and operation in _WRITES:
        kind = "read_only"
    retry = status in _RETRY_STATUS or code in _RETRY_CODES
    return Fault(text, kind, code=code, retry=retry, down=code in HOPELESS or status in _OVERLOAD)


def _hint(code: str, operation: str, region: str | None) -> str | None:
    if code in _DENIED:
        hint = f"these credentials lack {_PERMISSIONS.get(operation, 'the permission')}"
        if operation in ("GetObject", "HeadObject"):
            hint += " (or s3:ListBucket, without which S3 answers so for an object that is not there)"
        if code != "AccessDenied":  # a HEAD has no body that could tell
            hint += ", or are wrong"
        return hint
    hint_ = _HINTS.get(code)
    return f"{hint_}, `{region}`" if hint_ is _REGION and region else hint_
