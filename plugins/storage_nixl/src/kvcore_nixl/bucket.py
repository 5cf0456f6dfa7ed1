"""What NIXL cannot do with a bucket: delete, list, and say what is wrong. By boto3."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.api import StorageError
from kvcore_nixl.config import NixlConfig

_CONNECT_S = 3.0
_READ_S = 15.0
_CREDENTIALS = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "ExpiredToken", "InvalidToken")


class Bucket:
    """One bucket. Methods raise `StorageError`; several threads may call them at once."""

    def __init__(self, config: NixlConfig) -> None:
        try:
            import boto3
            import botocore.session
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise StorageError(
                f"`backend: obj` needs boto3 to delete and list ({error}): pip install 'kvcore-nixl[obj]'"
            ) from error
        self._config = config
        self._name = str(config.bucket)
        try:
            core = botocore.session.get_session()
            if config.credentials_file is not None:
                core.set_config_variable("credentials_file", str(config.credentials_file.expanduser()))
            session = boto3.Session(botocore_session=core, profile_name=config.profile)
            self._region = config.region or session.region_name or "us-east-1"
            self._credentials = session.get_credentials()
            self._client: Any = session.client(
                "s3",
                endpoint_url=config.endpoint,
                region_name=self._region,
                verify=str(config.ca_bundle) if config.ca_bundle else None,
                config=Config(
                    connect_timeout=_CONNECT_S,
                    read_timeout=_READ_S,
                    max_pool_connections=10,
                    retries={"mode": "standard", "total_max_attempts": 2},
                    s3={"addressing_style": config.addressing},
                ),
            )
        except BotoCoreError as error:
            raise StorageError(f"bucket {self._name!r}: {error}") from error

    def nixl_params(self) -> dict[str, str]:
        """The parameters of NIXL's backend. They hold the access key: never to be shown."""
        config = self._config
        endpoint = str(self._client.meta.endpoint_url)  # perhaps AWS_ENDPOINT_URL_S3's, of which NIXL does not know
        params = {
            "bucket": self._name,
            "region": self._region,
            "scheme": "http" if endpoint.startswith("http:") else "https",
            "use_virtual_addressing": "true" if config.addressing == "virtual" else "false",
            "req_checksum": config.checksum,
            "num_threads": str(config.threads),
        }
        if ".amazonaws." not in endpoint:
            params["endpoint_override"] = endpoint.rstrip("/")
        if config.ca_bundle:
            params["ca_bundle"] = str(config.ca_bundle)
        key = self._credentials.get_frozen_credentials() if self._credentials is not None else None
        if key is not None and not key.token:  # one with a token ends; NIXL's own AWS library finds and renews those
            params |= {"access_key": key.access_key, "secret_key": key.secret_key}
        return params | config.params

    def check(self) -> None:
        """Prove that the bucket answers and that the credentials are good for it."""
        with self._explained():
            self._client.list_objects_v2(Bucket=self._name, Prefix=self._config.prefix, MaxKeys=1)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; an absent one is no error."""
        with self._explained():
            for name in names:  # one by one: several servers refuse the request for many
                self._client.delete_object(Bucket=self._name, Key=name)

    def entries(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key, length in bytes and time of storing (seconds since the epoch) of all objects below `prefix`."""
        with self._explained():
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=prefix):
                for found in page.get("Contents", ()):
                    yield found["Key"], found["Size"], found["LastModified"].timestamp()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        where = f"bucket {self._name!r} at {self._config.endpoint or 'AWS'}"
        try:
            yield
        except NoCredentialsError as error:
            raise StorageError(
                f"{where}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a `profile`"
            ) from error
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("NoSuchBucket", "404"):
                raise StorageError(f"{where} does not exist: create it, or name another with `bucket`") from error
            if code in _CREDENTIALS:
                raise StorageError(
                    f"{where} refuses the credentials ({code}): check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
                    "`profile`, and that they may list, read, write and delete there"
                ) from error
            raise StorageError(f"{where}: {error}") from error
        except BotoCoreError as error:
            raise StorageError(f"{where} does not answer ({error}): check `endpoint`, and that it runs") from error
