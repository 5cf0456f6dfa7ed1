"""The options of the event stream."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcore.api import PluginConfig, Size


def _endpoint(value: str) -> str:
    if value.partition("://")[0] not in ("tcp", "ipc"):
        raise ValueError(
            f"{value!r} is no endpoint: write one such as tcp://127.0.0.1:5557 or ipc:///run/kvcore.events"
        )
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class EventsConfig(PluginConfig):
    """Options of `hooks: [{plugin: events, ...}]`."""

    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    """Where subscribers (SUB) connect to: the address that is bound. `tcp://*:5557` is every address of the machine."""

    replay_endpoint: Endpoint | None = None
    """Where subscribers that missed batches ask for them (REQ or DEALER). Default: nowhere."""

    topic: str = ""
    """The first frame of every message. Some routers read an engine's name and model from it: `kv@NAME@MODEL`."""

    block_hashes: Literal["int", "bytes"] = "int"
    """How hashes are written: their last 64 bits as a number, which all routers read, or whole. vLLM has the same
    choice for its own events, `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`, and the same default."""

    data_parallel_rank: int = Field(default=0, ge=0)
    """The rank that stands in every batch."""

    queue_objects: int = Field(default=100_000, ge=1)
    """How many objects may wait to be published. More are dropped, and their sequence numbers are left out."""

    replay_size: Size = Field(default=16 << 20, ge=0)
    """Bytes of batches that are kept for `replay_endpoint`."""

    @model_validator(mode="after")
    def _apart(self) -> "EventsConfig":
        if self.replay_endpoint == self.endpoint and not self.endpoint.endswith((":0", ":*")):
            raise ValueError(f"`endpoint` and `replay_endpoint` are both {self.endpoint}: give each a port of its own")
        return self
