"""What is shown of a cache, typed: over its own socket and over HTTP alike. Sizes are bytes, times are UTC."""

import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvcore.api.keys import NAMESPACE_LEAST

Namespace = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Beginning = Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{NAMESPACE_LEAST},32}}$")]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]*$")]
TierName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
MAX_REQUESTS = 1000
MAX_HOT = 200


def when(at_monotonic: float) -> datetime:
    """A time of the monotonic clock as one of the calendar."""
    return datetime.fromtimestamp(time.time() - (time.monotonic() - at_monotonic), UTC)


class Model(BaseModel):
    """Closed and immutable; its docstrings are the descriptions. Built at its first use: a start shall be short."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


# -- status ------------------------------------------------------------------------------------------------------------


class L1Model(Model):
    """Host memory."""

    size: int
    """Bytes of the arena."""
    free: int
    """Bytes that hold nothing."""
    quarantined: int
    """Bytes whose write lease ran out and whose writer has not answered."""
    objects: int
    """Objects that can be read."""
    staging: int
    """Objects that are being written."""
    leases: int
    """Leases held by engines and by what is written to tiers."""
    pinned: int
    """Objects that a pin keeps."""


class UsageModel(Model):
    """What a storage says that it holds."""

    nbytes: int
    objects: int
    capacity: int | None
    """Bytes it may hold, where it keeps to a limit."""
    age_s: float
    """Seconds since it said so."""


class TierModel(Model):
    """One tier."""

    name: str
    storage: str
    """The storage plugin."""
    serde: list[str]
    """The serde plugins, in the order in which they encode."""
    write: str
    """`all`, `reused`, `evicted` or `none`."""
    promote: bool
    state: Literal["open", "opening", "down", "stuck"]
    """`down`: its circuit breaker leaves it alone; `stuck`: calls hang in it beyond their deadline."""
    since: datetime | None
    """Since when it is not open."""
    cause: str
    """Why it is not open."""
    queue_objects: int
    """Objects that wait to be written."""
    queue_bytes: int
    usage: UsageModel | None
    """None where the storage cannot tell, or has not yet."""


class SessionModel(Model):
    """One client of the server."""

    name: str
    """The name that the engine gave itself."""
    pid: int
    """Its process, as it says."""
    since: datetime
    """When it connected."""
    spaces: int
    """Models (and tenants) that it has registered."""
    lookups: int
    """Lookups that hold leases."""
    plans: int
    """Stores that are being copied."""
    workers: int
    """Workers that have the arena mapped."""


class HelperModel(Model):
    """One program of `plugins.run`."""

    name: str
    """Its file name, with a number where it is listed several times."""
    path: str
    state: Literal["running", "waiting", "ended", "failed"]
    """`waiting`: for its next start; `ended`: it is not to be started again; `failed`: it has ended too often."""
    since: datetime
    """Since when it is so."""
    pid: int | None
    """Its process, which leads a group of that number; None while it does not run."""
    starts: int
    """Times it was started."""
    last: str
    """How it last ended; empty while it has not."""


class StatusModel(Model):
    """The whole cache at one glance."""

    version: str
    name: str
    kind: Literal["server", "engine", "store", "client"]
    """`engine`: a cache inside an engine; `store`: tiers without L1, inside an engine; `client`: an engine that uses a
    server."""
    pid: int
    address: str
    """Where engines connect; of a client, its server's; empty for a cache inside an engine."""
    connected: bool | None
    """Of a client, whether its server is there."""
    started: datetime
    uptime_s: float
    models: dict[str, str]
    """Model -> the folder of its weights; empty where another process has read them, such as the engine of a server."""
    l1: L1Model | None
    """None where there is none: a client's is its server's."""
    tiers: list[TierModel]
    sessions: list[SessionModel]
    helpers: list[HelperModel]
    """Programs of `plugins.run`."""


# -- requests ----------------------------------------------------------------------------------------------------------


class RequestsQuery(Model):
    """Which requests."""

    since: int | None = Field(default=None, ge=0, lt=1 << 62)
    """Only those with a greater `seq`, such as `next` of the answer before, the oldest first; without it the newest."""
    limit: int = Field(default=100, ge=1, le=MAX_REQUESTS)
    """Most requests of the answer."""
    hashes: bool = False
    """With the hashes of their chunks."""
    follow: bool = False
    """Whoever asks records, and will ask again: a cache that closes waits for that, for a second and a half at most."""


class RequestModel(Model):
    """What was asked of the cache for one request, and what came of it."""

    seq: int
    """Grows by one with each lookup of this cache."""
    at: datetime
    """When it was looked up."""
    id: str
    """The engine's own name for the request; empty where it gave none."""
    namespace: str
    """Hexadecimal; empty where a server has not said it yet."""
    model: str
    """Empty where the cache has not been told what the namespace stands for."""
    tenant: str
    adapter: str
    """The LoRA's name."""
    salt: str
    """A short hash of the cache salt, never the salt."""
    tokens: int
    """Of its prompt; 0 where the engine did not say."""
    chunk_tokens: int
    """Tokens of a chunk."""
    chunks: int
    """Whole chunks of its prompt."""
    first: int
    """Chunks at the front that the engine held itself."""
    answer: int | None
    """Chunks from the front that the engine or the cache had; None while tiers are asked."""
    sources: dict[str, int]
    """Where what the cache had was: `l1` or a tier's name -> objects."""
    misses: dict[str, int]
    """Why the others were not there -> objects."""
    broke: str
    """Why the chunk at `answer` could not be used; empty when all could. A reason of `kvcore_miss_chunks_total`, or
    `window`."""
    blame: str
    """The tiers that are the cause, with commas between, where that is known."""
    seconds: float
    """From the question to the answer."""
    retrieved: int
    """Tokens that the engine then took from the cache."""
    stored: int
    """Chunks that it has stored since."""
    begin: int
    """The chunk of the first hash: a server does not hear of those that the engine held itself."""
    token_bytes: int | None = None
    """KV of a token, in all groups and ranks; None where the cache does not know the model."""
    hashes: list[str] | None = None
    """Of its chunks, from `begin` on, hexadecimal; where they were asked for."""


class RequestsModel(Model):
    """Requests in the order in which they were looked up."""

    requests: list[RequestModel]
    next: int
    """`since` of the next question."""
    oldest: int
    """The least `seq` that is still on record; 0: none is."""
    newest: int
    """The greatest `seq` there has been."""


# -- history -----------------------------------------------------------------------------------------------------------


class HistoryQuery(Model):
    """Which part."""

    since: float = 0.0
    """Only what is later: seconds since 1970. The state of now is always the last point."""


class HistoryModel(Model):
    """Numbers of the cache since it was opened, oldest first; the last point is that of now."""

    every_s: float
    """Seconds between two points, which grow as the history does; a cache at rest may leave some out."""
    times: list[float]
    """Seconds since 1970, one for each point."""
    series: dict[str, list[float | None]]
    """A metric without its `kvcore_`, and its labels, as in `tier_bytes/disk/load` -> its value at each point; of a
    histogram its sum in seconds; None: there was none yet."""


# -- what is asked for most --------------------------------------------------------------------------------------------


class HotQuery(Model):
    """How many."""

    limit: int = Field(default=20, ge=1, le=MAX_HOT)
    """Most prefixes, and most tenants."""


class PrefixModel(Model):
    """A prefix that several requests on record have in common, as long as all of them do."""

    hash: Hex
    """Of its last chunk."""
    namespace: str
    model: str
    tenant: str
    chunks: int
    tokens: int
    requests: int
    """How many begin with it."""
    hits: int
    """To how many of them the engine or the cache could give all of it."""
    found: float
    """The share of its chunks that they could give, on average."""
    last: datetime
    """When the last of them came."""
    resident: bool | None
    """Whether its last chunk is in L1; None where there is no L1 to look at."""


class TenantTrafficModel(Model):
    """Requests on record of one tenant."""

    tenant: str
    """Empty: those who said none."""
    requests: int
    chunks: int
    """Whole chunks of their prompts, those that the engine held included."""
    found: int
    """Of these, what the engine or the cache had."""
    retrieved: int
    """Tokens that came from the cache."""


class HotModel(Model):
    """What the requests on record have in common, and whose they are."""

    requests: int
    """How many are on record."""
    since: datetime | None
    """When the oldest of them came."""
    chunks: int
    """Whole chunks of their prompts."""
    own: int
    """Of these, what their engines held themselves."""
    found: int
    """What the cache had beyond that. The rest was computed."""
    prefixes: list[PrefixModel]
    """Those whose reuse saves most come first: by tokens times the requests after the first."""
    tenants: list[TenantTrafficModel]
    """Those with most requests come first."""


# -- what can be changed -----------------------------------------------------------------------------------------------


class ClearModel(Model):
    """What to forget: exactly one of `namespace`, `tenant` and `all`."""

    namespace: Beginning | None = None
    """These objects; hexadecimal. Of one that is known here, 6 characters or more of its beginning will do."""
    tenant: str | None = Field(default=None, max_length=1024)
    """Those of all models of which L1 holds something for this tenant, or that engines use for it; with `tiers`, where
    there is none, of all that this user's caches have had. By its name, or the `#hash` that is shown of it."""
    all: Literal[True] | None = None
    """Everything."""
    tiers: bool | list[TierName] = False
    """True: in all tiers, too, for every process that shares them. Or the names of some."""

    @model_validator(mode="after")
    def _one(self) -> "ClearModel":
        given = [name for name in ("namespace", "tenant", "all") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of namespace, tenant and all, not {' and '.join(given) or 'none'}")
        return self


class ClearedModel(Model):
    """What was forgotten."""

    l1: int
    """Objects in L1. What an engine reads just now stays."""
    tiers: dict[str, int]
    """Objects by tier."""
    complete: bool
    """False: the time was up, ask again to go on."""
    problems: dict[str, str]
    """By tier, why it was not, or not wholly, cleared."""
