"""The boto3 client, set up for a cache: no retries and no checksums of its own, as few steps as it lets us have."""

import base64
import hashlib
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from kvcore.api import StorageError
from kvcore_s3 import __version__
from kvcore_s3.config import S3Config

DEFAULT_REGION = "us-east-1"


def make_client(config: S3Config) -> Any:
    """An S3 client. It connects at its first request. Raises `StorageError` for what is wrong with the options."""
    for option in ("credentials_file", "ca_bundle"):
        path = getattr(config, option)
        if path is not None and not path.expanduser().is_file():
            raise StorageError(f"`{option}` {path}: there is no such file")
    # over TLS the bytes are protected without being part of the signature; what is used is known once it is made
    signed = config.sign_payload == "always"
    try:
        session = _session(config)
        client = _client(session, config, signed)
        if config.sign_payload == "auto" and client.meta.endpoint_url.startswith("http:"):
            client.close()
            client = _client(session, config, True)
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"the AWS configuration cannot be used: {error}{_profiles(config)}") from error
    client.meta.events.register_last("before-call.s3", _no_expect)
    client.meta.events.register_last("before-call.s3.DeleteObjects", _add_md5)
    return client


def _session(config: S3Config) -> Any:
    # with a profile, which the file has, variables of the environment do not come before it
    profile = config.profile or ("default" if config.credentials_file else None)
    session = botocore.session.Session(profile=profile)
    if config.credentials_file is not None:
        session.set_config_variable("credentials_file", str(config.credentials_file.expanduser()))
    # nobody here reads a time, and to parse those of a page takes longer than all the rest of it
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    secret, token = config.secret_access_key, config.session_token
    return boto3.session.Session(
        botocore_session=session,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        aws_session_token=token.get_secret_value() if token else None,
    )


def _client(session: Any, config: S3Config, signed: bool) -> Any:
    style = "path" if config.addressing == "auto" and config.endpoint else config.addressing
    return session.client(
        "s3",
        endpoint_url=config.endpoint,
        region_name=config.region or session.region_name or DEFAULT_REGION,
        verify=str(config.ca_bundle.expanduser()) if config.ca_bundle else None,
        config=Config(
            connect_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
            max_pool_connections=2 * config.concurrency,
            retries={"total_max_attempts": 1},
            tcp_keepalive=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra=f"kvcore-s3/{__version__}",
            s3={"addressing_style": style, "payload_signing_enabled": signed},
        ),
    )


def _no_expect(params: dict[str, Any], **_: Any) -> None:
    """`Expect: 100-continue` costs a round trip before each upload, and a second with a server that ignores it."""
    params["headers"].pop("Expect", None)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Servers older than S3's newer checksums insist on this one."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _profiles(config: S3Config) -> str:
    if config.profile is None:
        return ""
    known = botocore.session.Session().available_profiles
    return f"; the profiles are: {', '.join(known) or 'none'}"
