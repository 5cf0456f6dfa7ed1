"""Options of the aesgcm serde."""

import re
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from kvcore.api import PluginConfig

_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")
_SOURCE = re.compile(r"(env|file):.+")
_KEY = re.compile(r"(?:env:|file:)?[0-9A-Fa-f]{64}")


class AesGcmConfig(PluginConfig):
    """Options of `serde: [{plugin: aesgcm, ...}]`. No key ever stands in the configuration, only where to find it; and
    should one stand there by mistake, no error repeats it."""

    keys: dict[str, SecretStr] = Field(min_length=1)
    """Key id -> `env:NAME` or `file:PATH`, where 64 hexadecimal digits are (`openssl rand -hex 32` makes some). All of
    these decrypt. The id is written beside what the key encrypts: another key needs another id."""
    key: str | None = None
    """The id of the key that encrypts. May be left out when there is only one."""

    @field_validator("keys")
    @classmethod
    def _named(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for i, (name, secret) in enumerate(keys.items(), 1):
            if not _ID.fullmatch(name):
                raise ValueError(f"the id of key {i} is none: 1 to 32 of A-Z, a-z, 0-9, '.', '_' and '-' are needed")
            source = secret.get_secret_value()
            if _KEY.fullmatch(source) or not _SOURCE.fullmatch(source):
                raise ValueError(f"key {name!r}: write env:NAME or file:PATH; a key itself does not belong here")
            if source.startswith("env:KVCORE_"):
                raise ValueError(
                    f"key {name!r}: variables that begin with KVCORE_ are options of kvcore; name it otherwise"
                )
        return keys

    @model_validator(mode="after")
    def _one_encrypts(self) -> Self:
        if self.key is None and len(self.keys) > 1:
            raise ValueError(f"key: name the one of {', '.join(self.keys)} that encrypts")
        if self.key is not None and self.key not in self.keys:
            raise ValueError(f"key: is not the id of one of the keys, which are {', '.join(self.keys)}")
        return self

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return self.key or next(iter(self.keys))
