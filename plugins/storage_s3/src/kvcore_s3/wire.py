"""Requests for objects: signed by botocore, sent by urllib3.

boto3's client validates, serialises, resolves and parses each request by models, in half a millisecond of the
interpreter, which an engine has better uses for. What moves objects has no need of that, and gets the time that is left
as its timeout, which boto3 cannot be told. boto3 says where the bucket is and what the keys are, and does the rest.
"""

import re
import socket
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from kvcore_s3 import __version__
from kvcore_s3.call import Call
from kvcore_s3.faults import answered
from kvcore_s3.streams import Body

SEND_BYTES = 256 << 10
"""Sent at a time: each piece has the time of a timeout."""
_KEEPALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
_MAX_ERROR_BYTES = 64 << 10
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,500})</Message>")
_OPERATIONS = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject"}


class Wire:
    """Sends requests to one bucket, from any thread.

    Args:
        address: the bucket's URL.
        credentials: botocore's, which renew themselves.
        signed: payloads are part of the signature.
        ca_bundle: certificates to trust; None for botocore's own.
        connections: how many are kept.
    """

    def __init__(
        self, address: str, credentials: Any, region: str, *, signed: bool, ca_bundle: str | None, connections: int
    ) -> None:
        self._address = address.rstrip("/") + "/"
        self._credentials = credentials
        self._region = region
        self._context = {"client_config": Config(s3={"payload_signing_enabled": signed})}
        options = {
            "maxsize": connections,
            "blocksize": SEND_BYTES,
            "retries": False,
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": get_cert_path(ca_bundle or True),
            "socket_options": [*urllib3.connection.HTTPConnection.default_socket_options, _KEEPALIVE],
        }
        proxy = get_environ_proxies(self._address).get(urlsplit(self._address).scheme)
        self._pool = _through(proxy, options) if proxy else urllib3.PoolManager(**options)

    def send(
        self,
        call: Call,
        method: str,
        name: str,
        *,
        headers: dict[str, str] | None = None,
        body: Body | None = None,
        query: dict[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """The answer, when it is a good one; that to a GET is still to be read, and to be closed. Else raises `Fault`
        or what urllib3 raises."""
        url = self._address + quote(name) + ("?" + urlencode(query) if query else "")
        given = {"User-Agent": f"kvcore-s3/{__version__}", **(headers or {})}
        if body is not None:
            given["Content-Length"] = str(len(body))
        left_s, limits = max(call.left_s, 0.001), call.limits
        file: Any = body
        response = self._pool.request(
            method,
            url,
            body=file,
            headers=self._signed(method, url, given, body),
            timeout=urllib3.Timeout(connect=min(limits.connect_s, left_s), read=min(limits.read_s, left_s)),
            preload_content=method != "GET",
            decode_content=False,
            redirect=False,
        )
        if response.status not in (200, 206):
            try:
                text = response.read(_MAX_ERROR_BYTES) if method == "GET" else response.data
            finally:
                response.close()
            raise self._fault(call, method, name, query, response, text.decode(errors="replace"))
        return response

    def close(self) -> None:
        """Close the connections that nobody uses; the others end with their request."""
        self._pool.clear()

    def _signed(self, method: str, url: str, headers: dict[str, str], body: Body | None) -> dict[str, str]:
        if self._credentials is None:
            raise NoCredentialsError
        request = AWSRequest(method=method, url=url, headers=headers, data=body)
        request.context.update(self._context)
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    @staticmethod
    def _fault(call: Call, method: str, name: str, query: dict[str, str] | None, response: Any, text: str) -> Exception:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        return answered(
            call.limits.place.format(name),
            "UploadPart" if query else _OPERATIONS[method],
            response.status,
            code[1] if code else str(response.status),
            message[1] if message else None,
            response.headers,
        )


def _through(proxy: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    """Through a proxy, whose URL may have a name and a password."""
    url = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    keys = None
    if url.username is not None:
        keys = urllib3.make_headers(proxy_basic_auth=f"{unquote(url.username)}:{unquote(url.password or '')}")
    where = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    return urllib3.ProxyManager(where, proxy_headers=keys, **options)
