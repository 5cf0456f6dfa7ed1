"""Options of the aesgcm serde."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from kvcore.api import PluginConfig

_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")
_SOURCE = re.compile(r"(env|file):.+")


class AesGcmConfig(PluginConfig):
    """Options of `serde: [{plugin: aesgcm, ...}]`. No key ever stands in the configuration, only where to find it."""

    keys: dict[str, str] = Field(min_length=1)
    """Key id -> `env:NAME` or `file:PATH`, where 64 hexadecimal digits are (`openssl rand -hex 32` makes some). All of
    these decrypt. The id is written beside what the key encrypts."""
    key: str | None = None
    """The id of the key that encrypts. May be left out when there is only one."""

    @field_validator("keys")
    @classmethod
    def _named(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, source in keys.items():
            if not _ID.fullmatch(name):
                raise ValueError(f"{name!r} is not a key id: 1 to 32 of A-Z, a-z, 0-9, '.', '_' and '-' are")
            if not _SOURCE.fullmatch(source):
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
            raise ValueError(f"key: {self.key!r} is not one of the keys {', '.join(self.keys)}")
        return self

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return self.key or next(iter(self.keys))
