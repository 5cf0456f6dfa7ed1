"""What goes over HTTP, typed: the source of `/openapi.json`. Sizes are bytes, times are UTC."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, RootModel, WithJsonSchema

from kvcore.api import parse_size
from kvcore.service.inspect.models import Hex, Model, Namespace, TierModel, TierName

Status = Literal["ok", "degraded", "stuck"]
MAX_PAGE = 1000
MAX_DRAIN_S = 30.0


# -- health ------------------------------------------------------------------------------------------------------------


class CheckModel(Model):
    """One thing that is watched."""

    name: str
    """Such as `loop tiers`, `reaper` or `tier disk`."""
    status: Status
    """`degraded`: requests go on without it."""
    since: datetime | None
    """Since when it is not ok."""
    detail: str
    """What is the matter; empty when it is ok."""


class HealthModel(Model):
    """The worst of all checks, and each of them."""

    status: Status
    """503 for `stuck`, else 200."""
    checks: list[CheckModel]


# -- namespaces --------------------------------------------------------------------------------------------------------


class NamespaceModel(Model):
    """One namespace in L1."""

    namespace: Namespace
    model: str
    """The model that engines use it for just now; empty: none does."""
    tenant: str
    objects: int
    nbytes: int
    """Bytes of L1 that they take."""


class NamespacesQuery(Model):
    """How many."""

    limit: int = Field(default=100, ge=1, le=MAX_PAGE)
    """Most namespaces of the answer: those that hold most come first."""


class NamespacesModel(Model):
    """Namespaces that L1 knows."""

    namespaces: list[NamespaceModel]
    total: int
    """How many there are."""


# -- objects -----------------------------------------------------------------------------------------------------------


class ObjectsQuery(Model):
    """Which objects, and which page of them."""

    tier: TierName = "l1"
    """`l1` or a tier's name."""
    namespace: Namespace | None = None
    """Only these; hexadecimal."""
    limit: int = Field(default=100, ge=1, le=MAX_PAGE)
    """Most objects of a page. A page may hold fewer, even none, and still have a next."""
    cursor: str | None = Field(default=None, max_length=64)
    """`next` of the page before, with everything else as it was."""


class ObjectModel(Model):
    """One object."""

    name: str
    """Namespace, group and chunk hash: `NAMESPACE-GROUP-HASH`."""
    nbytes: int
    """In L1 the payload; in a tier as stored, header included."""
    used: datetime | None = None
    """When it was last stored or loaded, where the storage knows."""


class ObjectsModel(Model):
    """One page of a listing, in no particular order."""

    tier: str
    objects: list[ObjectModel]
    next: str | None
    """The next page's `cursor`, good for a minute and for once; None: this was the last."""


class PlaceModel(Model):
    """Where one object is."""

    tier: str
    nbytes: int | None
    """In L1."""
    readers: int | None
    """In L1: leases on it."""


class ObjectPlacesModel(Model):
    """One object, wherever it is."""

    name: str
    namespace: Namespace
    chunk_hash: Hex
    group: int
    places: list[PlaceModel]


# -- tenants -----------------------------------------------------------------------------------------------------------


class TenantsQuery(Model):
    """Which tenants."""

    tenant: str | None = Field(default=None, max_length=1024)
    """Only this one."""
    limit: int = Field(default=100, ge=1, le=MAX_PAGE)
    """Most tenants of the answer: those that hold most come first."""


class TenantPlaceModel(Model):
    """What a tenant has of one place, in bytes."""

    place: str
    """`l1` or a tier's name."""
    used: int
    pinned: int
    """Of these, what is being read or written."""
    quota: int
    """What it is given."""
    share: int
    """What it can rely on: the quota, scaled down where the quotas exceed the place."""


class TenantModel(Model):
    """One tenant."""

    tenant: str
    """Empty: those who said none. `default`: all without a quota of their own; what they hold is theirs together, quota
    and share are what each of them has."""
    places: list[TenantPlaceModel]


class TenantsModel(Model):
    """Tenants in the places that are divided: those for which the configuration gives a quota to anybody."""

    tenants: list[TenantModel]
    total: int
    """How many there are."""


def _quota(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


Quota = Annotated[
    Annotated[int, Field(ge=0)] | None,
    BeforeValidator(_quota),
    WithJsonSchema({"anyOf": [{"type": "string", "examples": ["2GiB"]}, {"type": "integer"}, {"type": "null"}]}),
]


class QuotasModel(Model):
    """New quotas of a tenant, until the server ends."""

    quotas: dict[str, Quota] = Field(min_length=1)
    """`l1` or a tier's name -> a size such as `2GiB`, or bytes; null: it has what those without a quota have."""


# -- tiers -------------------------------------------------------------------------------------------------------------


class TiersModel(Model):
    """All tiers, in order of preference."""

    tiers: list[TierModel]


class NewTierQuery(Model):
    """Where a new tier stands."""

    before: TierName | None = None
    """The tier that it stands before. Default: it is the last."""


class NewTier(RootModel[dict[str, Any]]):
    """A tier as it would stand in `l2` of the configuration: `{"storage": {"plugin": "disk", "path": "/cache"}}`."""


class RemoveTierQuery(Model):
    """How a tier is removed."""

    drain_s: float = Field(default=10.0, ge=0, le=MAX_DRAIN_S)
    """Seconds that it has to write what waits. What it has not written then stays in L1 only."""


class RemovedTierModel(Model):
    """A tier that is no more."""

    name: str
    dropped: int
    """Objects that waited to be written, and were not."""


class PluginModel(Model):
    """One installed plugin."""

    kind: str
    name: str
    distribution: str
    version: str
    module: str
    builtin: bool
    status: str
    """`ready`, `blocked`, `clash` or `reserved`."""


class PluginsModel(Model):
    """What is installed, from metadata alone, as it was at the start."""

    plugins: list[PluginModel]
