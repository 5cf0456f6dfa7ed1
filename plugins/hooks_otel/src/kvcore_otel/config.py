"""The options of the traces. What is not said here is read from OpenTelemetry's own variables."""

import os
from importlib.util import find_spec
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from kvcore.api import PluginConfig

Protocol = Literal["http/protobuf", "grpc"]
_MODULES = {"http/protobuf": "opentelemetry.exporter.otlp.proto.http", "grpc": "opentelemetry.exporter.otlp.proto.grpc"}


class OtelConfig(PluginConfig):
    """Options of `hooks: [{plugin: otel, ...}]`."""

    endpoint: str | None = None
    """Where the collector is, such as `http://127.0.0.1:4318` (`http/protobuf`) or `http://127.0.0.1:4317` (`grpc`).
    Default: what `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` says, else port 4318 or 4317 of
    this machine."""

    protocol: Protocol | None = None
    """Default: what `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` or `OTEL_EXPORTER_OTLP_PROTOCOL` says, else `http/protobuf`.
    `grpc` needs `pip install "kvcore-otel[grpc]"`."""

    queue_spans: int = Field(default=16_384, ge=1)
    """How many spans may wait to be sent. More are dropped, counted, and logged."""

    @field_validator("endpoint")
    @classmethod
    def _a_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no endpoint: write one such as http://127.0.0.1:4318")
        return value

    @model_validator(mode="after")
    def _there(self) -> "OtelConfig":
        chosen = self.chosen_protocol
        if chosen not in _MODULES:
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL or OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {chosen!r}: "
                f"this plugin speaks {' and '.join(get_args(Protocol))}"
            )
        if not _installed(_MODULES[chosen]):
            raise ValueError(f'protocol {chosen} needs another package: run pip install "kvcore-otel[grpc]"')
        return self

    @property
    def chosen_protocol(self) -> str:
        """The option's, or the environment's, which may be none that there is."""
        named = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        return self.protocol or next(filter(None, map(os.environ.get, named)), "http/protobuf")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
