"""The ASGI application: the endpoints over one cache."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvcore.api import GROUPS, ObjectKey
from kvcore.config.tenants import DEFAULT_TENANT
from kvcore.control.tiers import NoSuchTier, TierConflict
from kvcore.engine import CacheEngine
from kvcore.explain.explain import NotOnRecord
from kvcore.explain.models import Comparison, DiffModel, Explanations, Question
from kvcore.l2 import Threads, Tier
from kvcore.observe.decisions import tenant_shown
from kvcore.service.http import models as m
from kvcore.service.http.guard import MAX_PROMPT_BYTES, Guard
from kvcore.service.http.health import Health, Post
from kvcore.service.http.listing import Listings, resident
from kvcore.service.http.openapi import document
from kvcore.service.http.prefixes import PrefixesQuery, PrefixTreeModel, prefixes
from kvcore.service.http.routes import Call, Endpoint, http_problem, route
from kvcore.service.http.settings import ConfigModel, settings
from kvcore.service.http.ui import routes as ui_routes
from kvcore.service.inspect import changing, explaining, views
from kvcore.service.inspect import models as shown
from kvcore.service.inspect.changing import PinModel, PinnedModel
from kvcore.service.inspect.clearing import clear, spaces_of
from kvcore.service.inspect.hot import hot
from kvcore.service.inspect.stored import SLICE, Row, Turns, on, stored
from kvcore.service.inspect.subject import Subject
from kvcore.service.problems import Problem
from kvcore.tenants import Usage

T = TypeVar("T")
CHANGE_S = 70.0
"""A tier that opens or drains takes less."""
ASK_S = 2.0
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _none() -> Sequence[Mapping[str, Any]]:
    return ()


@dataclass(frozen=True)
class Node:
    """What the endpoints show and change.

    Args:
        engine: the cache.
        address: where engines connect; empty for none.
        sessions: the clients of now, each with the fields of `SessionModel`; called on HTTP's thread, returns at once.
        loops: name -> how to have that loop call something, for `/healthz`. The tiers' own loop is always watched.
        helpers: the programs beside the cache, each with the fields of `HelperModel`; called like `sessions`.
        subject: the same cache as it is shown elsewhere, in place of address, sessions and helpers.
    """

    engine: CacheEngine
    address: str = ""
    sessions: Callable[[], Sequence[Mapping[str, Any]]] = _none
    loops: Mapping[str, Post] = field(default_factory=dict)
    helpers: Callable[[], Sequence[Mapping[str, Any]]] = _none
    subject: Subject | None = None


class Api:
    """The endpoints' handlers and what they keep between requests. On one loop."""

    def __init__(self, node: Node) -> None:
        self._engine = node.engine
        self._manager = node.engine.manager
        self._subject = node.subject or Subject(
            node.engine, node.engine.name, self._manager, (), node.address, node.sessions, node.helpers
        )
        self._health = Health(self._manager, node.loops)
        tiers = views.tiers(self._subject)
        assert tiers is not None
        self._tiers = tiers
        self._listings = Listings()
        self._turns = Turns()
        self._threads = Threads("kvcore-http-work", 4)

    def close(self) -> None:
        """Let its threads end."""
        self._threads.close()

    # -- health and numbers ------------------------------------------------------------------------------------------

    async def healthz(self, _: Call) -> Response:
        return _health(await self._health.live())

    async def readyz(self, _: Call) -> Response:
        return _health(await self._health.ready())

    async def metrics(self, _: Call) -> Response:
        return Response(await self._work(self._engine.metrics_text), media_type=PROMETHEUS)

    async def status(self, _: Call) -> shown.StatusModel:
        return await self._view(views.status)

    async def requests(self, call: Call) -> shown.RequestsModel:
        return await self._view(views.requests, call.query)

    async def history(self, call: Call) -> shown.HistoryModel:
        return await self._view(views.history, call.query)

    async def hot(self, call: Call) -> shown.HotModel:
        return await self._view(hot, call.query)

    async def explain(self, call: Call) -> Explanations:
        try:
            return await self._view(explaining.request, call.query)
        except NotOnRecord as error:
            raise Problem(404, "no-request", str(error)) from error

    async def explain_prompt(self, call: Call) -> Explanations:
        return await self._view(explaining.prompt, call.body)

    async def diff(self, call: Call) -> DiffModel:
        try:
            return await self._view(explaining.diff, call.body)
        except NotOnRecord as error:
            raise Problem(404, "no-request", str(error)) from error

    async def _view(self, view: Callable[[Subject, Any], T], query: Any = None) -> T:
        answer: T = await self._work(partial(view, self._subject, query))
        return answer

    async def plugins(self, _: Call) -> m.PluginsModel:
        found = await self._work(self._installed)
        return m.PluginsModel(plugins=[m.PluginModel(**p) for p in found])

    async def config(self, _: Call) -> ConfigModel:
        return settings(self._manager.config)

    def _installed(self) -> list[dict[str, Any]]:
        return [info.as_dict() for kind in GROUPS for info in self._manager.registry.available(kind)]

    # -- objects -----------------------------------------------------------------------------------------------------

    async def namespaces(self, call: Call) -> m.NamespacesModel:
        found: dict[bytes, list[int]] = {}
        for i, space in enumerate(list(self._manager.layouts)):
            sums = found.setdefault(space.namespace, [0, 0])
            sums[0] += len(space.objects)
            sums[1] += len(space.objects) * space.slot_bytes
            if i % SLICE == 0:
                await asyncio.sleep(0)
        known, tenants = spaces_of(self._engine), self._manager.tenancy.bound()
        shown = []
        for ns in heapq.nlargest(call.query.limit, found, key=lambda ns: found[ns][1]):
            model, (objects, nbytes) = known[ns].spec.model if ns in known else "", found[ns]
            tenant = self._subject.tenant(tenants.get(ns, ""))
            shown.append(
                m.NamespaceModel(namespace=ns.hex(), model=model, tenant=tenant, objects=objects, nbytes=nbytes)
            )
        return m.NamespacesModel(namespaces=shown, total=len(found))

    async def objects(self, call: Call) -> m.ObjectsModel:
        query: m.ObjectsQuery = call.query
        namespace = None if query.namespace is None else bytes.fromhex(query.namespace)
        what = (query.tier, namespace)
        rows, following = await self._listings.page(lambda: self._source(*what), what, query.cursor, query.limit)
        return m.ObjectsModel.model_construct(tier=query.tier, objects=rows, next=following)

    def _source(self, tier: str, namespace: bytes | None) -> AsyncIterator[Sequence[Row]]:
        if tier != "l1":
            names = None if namespace is None else {namespace}
            return stored(self._manager.loop, self._tier(tier), self._turns, names)
        return resident([s for s in list(self._manager.layouts) if namespace in (None, s.namespace)])

    async def prefixes(self, call: Call) -> PrefixTreeModel:
        found: PrefixTreeModel = await self._work(partial(prefixes, self._engine, call.query))
        return found

    async def object(self, call: Call) -> m.ObjectPlacesModel:
        try:
            key = ObjectKey.from_name(call.path["name"])
        except ValueError:
            text = f"{call.path['name']!r:.200} is no name of an object: /objects lists them as NAMESPACE-GROUP-HASH"
            raise Problem(422, "wrong-name", text) from None
        places = []
        for space in list(self._manager.layouts):
            found = space.objects.get(key.chunk_hash) if (space.namespace, space.group) == (key[0], key[2]) else None
            if found is not None:
                places.append(m.PlaceModel(tier="l1", nbytes=space.nbytes, readers=found.readers))
        tiers = list(self._manager.tiers)
        for tier, there in zip(tiers, await asyncio.gather(*(self._has(t, key) for t in tiers)), strict=True):
            if there:
                places.append(m.PlaceModel(tier=tier.name, nbytes=None, readers=None))
        if not places:
            raise Problem(404, "no-object", "neither L1 nor any tier that answers has this object")
        namespace, chunk_hash, group = key
        return m.ObjectPlacesModel(
            name=key.name, namespace=namespace.hex(), chunk_hash=chunk_hash.hex(), group=group, places=places
        )

    async def _has(self, tier: Tier, key: ObjectKey) -> bool:
        return any(await on(self._manager.loop, tier.exists([key])))  # bounded by the tier's own deadlines

    async def clear(self, call: Call) -> shown.ClearedModel:
        wanted: shown.ClearModel = call.body
        names = [t.name for t in list(self._manager.tiers)] if wanted.tiers is True else wanted.tiers or []
        tiers = [self._tier(name) for name in dict.fromkeys(names)]
        return await clear(self._engine, wanted, tiers, self._turns, self._work)

    async def pin(self, call: Call) -> PinnedModel:
        try:
            return await self._view(changing.pin, call.body)
        except NotOnRecord as error:
            raise Problem(404, "no-prefix", str(error)) from error

    # -- tenants -----------------------------------------------------------------------------------------------------

    async def tenants(self, call: Call) -> m.TenantsModel:
        query: m.TenantsQuery = call.query
        found = await self._work(self._tenants)
        if query.tenant is not None:
            found = {t: places for t, places in found.items() if query.tenant in (t, tenant_shown(t, ()))}
        most = heapq.nlargest(query.limit, found, key=lambda t: max(u.used for u in found[t].values()))
        # `default` is what all others share, and whoever asks for a name knows it
        asked = (DEFAULT_TENANT, query.tenant)
        tenants = [_tenant(t if t in asked else self._subject.tenant(t), found[t]) for t in most]
        return m.TenantsModel(tenants=tenants, total=len(found))

    async def set_quotas(self, call: Call) -> m.TenantModel:
        name, quotas = call.path["name"], call.body.quotas
        await self._work(partial(self._engine.set_quotas, name, quotas))
        return _tenant(name, (await self._work(self._tenants)).get(name, {}))

    def _tenants(self) -> dict[str, dict[str, Usage]]:
        defaults = self._engine.tenant_defaults()
        return self._engine.tenants() | ({DEFAULT_TENANT: defaults} if defaults else {})

    # -- tiers -------------------------------------------------------------------------------------------------------

    async def tiers(self, _: Call) -> m.TiersModel:
        return m.TiersModel(tiers=await self._work(self._tiers.all))

    async def add_tier(self, call: Call) -> shown.TierModel:
        before = call.query.before
        tier = await self._change(lambda: self._manager.add_tier(call.body.root, before))
        shown_tier: shown.TierModel = await self._work(partial(self._tiers.one, tier))
        return shown_tier

    async def remove_tier(self, call: Call) -> m.RemovedTierModel:
        name = call.path["name"]
        dropped = await self._change(lambda: self._manager.remove_tier(name, call.query.drain_s))
        return m.RemovedTierModel(name=name, dropped=dropped)

    async def _change(self, change: Callable[[], Any]) -> Any:
        try:
            return await self._work(change, CHANGE_S)
        except NoSuchTier as error:
            raise Problem(404, "no-tier", str(error)) from error
        except TierConflict as error:
            raise Problem(409, "conflict", str(error)) from error

    def _tier(self, name: str) -> Tier:
        tiers = list(self._manager.tiers)
        for tier in tiers:
            if tier.name == name:
                return tier
        names = ", ".join(["l1", *(t.name for t in tiers)])
        raise Problem(404, "no-tier", f"no tier is named {name!r}: there are {names}")

    async def _work(self, function: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """Run what takes longer, or waits for a lock, on a thread."""
        return await self._threads.run(function, timeout_s=timeout_s, what="the request")


def _tenant(name: str, places: Mapping[str, Usage]) -> m.TenantModel:
    found = [m.TenantPlaceModel(place=place, **usage._asdict()) for place, usage in places.items()]
    return m.TenantModel(tenant=name, places=found)


def _health(found: m.HealthModel) -> Response:
    return Response(found.model_dump_json(), 503 if found.status == "stuck" else 200, media_type="application/json")


def endpoints(api: Api) -> list[Endpoint]:
    """All of them, but for `/openapi.json` itself."""
    return [
        Endpoint(
            "GET", "/healthz", "Is anything stuck that a restart may heal? Also red (503) when a tier hangs",
            api.healthz, m.HealthModel, "health", problems=(503,),
        ),
        Endpoint(
            "GET", "/readyz", "Can engines be served? Red (503) when a loop is stuck; tiers do not matter",
            api.readyz, m.HealthModel, "health", problems=(503,),
        ),
        Endpoint("GET", "/metrics", "All metrics in the Prometheus text format", api.metrics, PROMETHEUS),
        Endpoint("GET", "/status", "The whole cache at one glance", api.status, shown.StatusModel),
        Endpoint(
            "GET", "/history", "The numbers of the cache since it was opened",
            api.history, shown.HistoryModel, query=shown.HistoryQuery,
        ),
        Endpoint(
            "GET", "/requests", "The last requests, and what they found",
            api.requests, shown.RequestsModel, "token", shown.RequestsQuery,
        ),
        Endpoint(
            "GET", "/hot", "What the last requests have in common, and whose they are",
            api.hot, shown.HotModel, "token", shown.HotQuery,
        ),
        Endpoint(
            "GET", "/explain", "Why a request on record was found, or not",
            api.explain, Explanations, "token", explaining.ExplainQuery, problems=(404,),
        ),
        Endpoint(
            "POST", "/explain", "What a lookup of a prompt would find now, and why no more",
            api.explain_prompt, Explanations, "token", body=Question, most_bytes=MAX_PROMPT_BYTES,
        ),
        Endpoint(
            "POST", "/diff", "How much two prompts have in common",
            api.diff, DiffModel, "token", body=Comparison, problems=(404,), most_bytes=MAX_PROMPT_BYTES,
        ),
        Endpoint("GET", "/plugins", "What is installed", api.plugins, m.PluginsModel),
        Endpoint(
            "GET", "/config", "Every value in force and its source, without secrets", api.config, ConfigModel, "token",
        ),
        Endpoint("GET", "/tiers", "All tiers, in order of preference", api.tiers, m.TiersModel),
        Endpoint(
            "POST", "/tiers", "Add a tier. Requests go on meanwhile; it is written to and read from once it is open",
            api.add_tier, shown.TierModel, "token", m.NewTierQuery, m.NewTier, 201, (404, 409),
        ),
        Endpoint(
            "DELETE", "/tiers/{name}", "Remove a tier. What is asked of it ends first, and what it stores stays there",
            api.remove_tier, m.RemovedTierModel, "token", m.RemoveTierQuery, problems=(404, 409),
        ),
        Endpoint(
            "GET", "/namespaces", "What L1 holds, by namespace",
            api.namespaces, m.NamespacesModel, "token", m.NamespacesQuery,
        ),
        Endpoint(
            "GET", "/objects", "The objects of L1 or of a tier, a page at a time",
            api.objects, m.ObjectsModel, "token", m.ObjectsQuery, problems=(404, 410, 502, 503),
        ),
        Endpoint(
            "GET", "/objects/{name}", "Where one object is",
            api.object, m.ObjectPlacesModel, "token", problems=(404, 422),
        ),
        Endpoint(
            "GET", "/prefixes", "What the requests on record of a namespace have in common, as a tree",
            api.prefixes, PrefixTreeModel, "token", PrefixesQuery,
        ),
        Endpoint(
            "POST", "/clear", "Forget objects. What a model computes meanwhile may be there again",
            api.clear, shown.ClearedModel, "token", body=shown.ClearModel, problems=(404,),
        ),
        Endpoint(
            "POST", "/pin", "Keep a prefix in L1 for a time, or no longer",
            api.pin, PinnedModel, "token", body=PinModel, problems=(404,), most_bytes=MAX_PROMPT_BYTES,
        ),
        Endpoint("GET", "/tenants", "What tenants hold and may", api.tenants, m.TenantsModel, "token", m.TenantsQuery),
        Endpoint(
            "PUT", "/tenants/{name:path}", "Change a tenant's quotas. Those of `default` are for all who have none",
            api.set_quotas, m.TenantModel, "token", body=m.QuotasModel,
        ),
    ]  # fmt: skip


def make_app(api: Api, *, token: str | None, loopback: bool = True, hosts: Collection[str] = ()) -> ASGIApp:
    """The application.

    Args:
        token: what a request must carry that changes something or shows objects; None: those are refused.
        loopback: only this machine can ask. Otherwise everything but the health endpoints needs the token.
        hosts: names of this machine that a `Host` header may have, beside `localhost` and IP addresses.
    """
    listed = endpoints(api)

    @cache
    def described() -> Response:
        return JSONResponse(document(listed, loopback))

    async def openapi(_: Call) -> Response:
        return described()

    listed.append(Endpoint("GET", "/openapi.json", "This document", openapi, "application/json"))
    routes = [*(route(e, token, loopback) for e in listed), *ui_routes()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: http_problem})
    app.router.redirect_slashes = False
    return Guard(app, hosts)
