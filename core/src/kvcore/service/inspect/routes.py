"""What can be asked of a cache over its own socket. `kvcore serve --http` offers the same under the same paths."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvcore.api import KVCoreError
from kvcore.service.inspect import models as m
from kvcore.service.inspect.hot import hot
from kvcore.service.inspect.subject import Subject
from kvcore.service.inspect.views import history, metrics, requests, status


class NotFound(KVCoreError):
    """There is nothing of that name: 404."""


class Route(NamedTuple):
    """One question. `view` is called with the cache and the query, or the body where there is no query; it answers with
    a model, or text. Raises `NotFound`, or another `KVCoreError` for what cannot be answered."""

    view: Callable[[Subject, Any], BaseModel | str]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/metrics"): Route(metrics),
    ("GET", "/status"): Route(status),
    ("GET", "/requests"): Route(requests, m.RequestsQuery),
    ("GET", "/history"): Route(history, m.HistoryQuery),
    ("GET", "/hot"): Route(hot, m.HotQuery),
}
