"""The two ways to the bucket: boto3's client, and the wire for objects, which goes where boto3 would."""

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
from kvcore_s3.faults import CREDENTIALS
from kvcore_s3.wire import Wire

DEFAULT_REGION = "us-east-1"


def connect(config: S3Config) -> tuple[Any, Wire]:
    """boto3's client and the wire. They connect at their first request.

    Raises `StorageError` for what is wrong with the options.
    """
    for option in ("credentials_file", "ca_bundle"):
        path = getattr(config, option)
        if path is not None and not path.expanduser().is_file():
            raise StorageError(f"`{option}` {path}: there is no such file")
    ca_bundle = str(config.ca_bundle.expanduser()) if config.ca_bundle else None
    try:
        core = _session(config)
        session = _with_keys(core, config)
        client = session.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region or session.region_name or DEFAULT_REGION,
            verify=ca_bundle,
            config=_settings(config),
        )
        client.meta.events.register_last("before-call.s3.DeleteObjects", _add_md5)
        address = _address(client, config.bucket)
        return client, Wire(
            address,
            session.get_credentials(),
            client.meta.region_name,
            # over TLS the bytes are protected without being part of the signature
            signed=config.sign_payload == "always" or (config.sign_payload == "auto" and address.startswith("http:")),
            ca_bundle=ca_bundle or core.get_config_variable("ca_bundle"),
            connections=2 * config.concurrency,
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"the AWS configuration cannot be used: {error}{_hint(config)}") from error


def _session(config: S3Config) -> botocore.session.Session:
    # with a profile, which the file has, variables of the environment do not come before it
    session = botocore.session.Session(profile=config.profile or ("default" if config.credentials_file else None))
    if config.credentials_file is not None:
        session.set_config_variable("credentials_file", str(config.credentials_file.expanduser()))
    # nobody here reads a time, and to parse those of a page takes longer than all the rest of it
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


def _with_keys(session: botocore.session.Session, config: S3Config) -> Any:
    secret, token = config.secret_access_key, config.session_token
    return boto3.session.Session(
        botocore_session=session,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        aws_session_token=token.get_secret_value() if token else None,
    )


def _settings(config: S3Config) -> Config:
    """No retries and no checksums of its own."""
    return Config(
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        max_pool_connections=config.concurrency,
        retries={"total_max_attempts": 1},
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"kvcore-s3/{__version__}",
        s3={"addressing_style": "path" if config.addressing == "auto" and config.endpoint else config.addressing},
    )


class _Asked(Exception):
    """Where a request would have gone."""


def _address(client: Any, bucket: str) -> str:
    """The bucket's URL as boto3 works it out, when it has keys. Nothing is sent."""

    def stop(request: Any, **_: Any) -> None:
        raise _Asked(request.url)

    client.meta.events.register("before-send.s3.HeadBucket", stop)
    try:
        client.head_bucket(Bucket=bucket)
    except _Asked as asked:
        return str(asked)
    finally:
        client.meta.events.unregister("before-send.s3.HeadBucket", stop)
    raise AssertionError


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Servers older than S3's newer checksums insist on this one."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _hint(config: S3Config) -> str:
    if config.profile is None:
        return f": {CREDENTIALS}"
    known = botocore.session.Session().available_profiles
    return f"; the profiles are: {', '.join(known) or 'none'}"
