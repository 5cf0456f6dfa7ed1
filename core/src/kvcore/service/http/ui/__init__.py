"""The page at `/ui`: plain files that a browser runs as they are. They hold no data: what the page shows, it asks of
the same endpoints as everybody, with the token that its reader gives.

Nothing is loaded from elsewhere, no script or style stands in the page itself, and the headers let none in.
"""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcore.service.problems import Problem

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
FILES = (
    "api.js", "app.js", "charts.js", "config.js", "dom.js", "history.js", "icon.svg", "index.html", "now.js",
    "objects.js", "plugins.js", "prefixes.js", "requests.js", "style.css", "words.js",
)  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """`/ui`, its files, and the way there from `/`."""
    return [
        Route("/", _home, methods=["GET"]),
        Route("/ui", _file, methods=["GET"]),
        Route("/ui/{name}", _file, methods=["GET"]),
    ]


async def _home(_: Request) -> Response:
    return Response(status_code=307, headers={"Location": "ui"})


async def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in FILES:
        return Problem(404, "not-found", f"the page has no file {name!r:.200}: it is at /ui").response()
    return Response(_read(name), headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])


@cache
def _read(name: str) -> bytes:
    return (files(__package__) / name).read_bytes()
