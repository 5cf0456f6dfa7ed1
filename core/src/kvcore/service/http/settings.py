"""The values in force and their sources, as `kvcore config show` has them."""

from typing import Any, Literal

from kvcore.config import Config
from kvcore.service.inspect.models import Model


class SourceModel(Model):
    """Where a value comes from."""

    kind: Literal["file", "environment", "flag", "default"]
    name: str
    """The file, the variable or the flag; empty for a default."""
    line: int
    """In the file, from 1; 0: not in a file."""
    column: int


class ValueModel(Model):
    """One value in force."""

    path: str
    """Such as `l2[0].storage.path`."""
    value: Any
    """With its unit; asterisks in place of a secret."""
    source: SourceModel


class ConfigModel(Model):
    """The configuration as it was read at the start. What was changed over HTTP since is not in it."""

    file: str | None
    """None: defaults, environment and flags alone."""
    values: list[ValueModel]


def settings(config: Config) -> ConfigModel:
    """All values; secrets are masked."""
    values = []
    for path, value, source in config.rows():
        where = SourceModel(kind=source.kind, name=source.name, line=source.line, column=source.column)
        values.append(ValueModel(path=path, value=value, source=where))
    return ConfigModel(file=config.file, values=values)
