"""What can be asked of a cache over its own socket. `kvcore serve --http` offers the same under the same paths."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvcore.explain.models import Comparison, Question
from kvcore.service.inspect import changing, explaining
from kvcore.service.inspect import models as m
from kvcore.service.inspect.hot import hot
from kvcore.service.inspect.subject import Subject
from kvcore.service.inspect.views import history, metrics, requests, status


class Route(NamedTuple):
    """One question. `view` is called with the cache and the query, or the body where there is no query; it answers with
    a model, or text. Raises a `KVCoreError` for what cannot be answered; `NotOnRecord` is 404. `late`: also a cache
    that is being closed answers it. `beside`: it may take long, and others are answered meanwhile."""

    view: Callable[[Subject, Any], BaseModel | str]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    late: bool = False
    beside: bool = False


ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/metrics"): Route(metrics),
    ("GET", "/status"): Route(status),
    ("GET", "/requests"): Route(requests, m.RequestsQuery, late=True),
    ("GET", "/history"): Route(history, m.HistoryQuery),
    ("GET", "/hot"): Route(hot, m.HotQuery),
    ("GET", "/explain"): Route(explaining.request, explaining.ExplainQuery),
    ("POST", "/explain"): Route(explaining.prompt, body=Question),
    ("POST", "/diff"): Route(explaining.diff, body=Comparison),
    ("POST", "/clear"): Route(changing.clear, body=m.ClearModel, beside=True),
    ("POST", "/pin"): Route(changing.pin, body=changing.PinModel),
}
