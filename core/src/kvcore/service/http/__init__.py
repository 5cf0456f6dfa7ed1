"""HTTP for people and their tools: health, metrics, what is cached, and what can be changed while it runs.

Starlette and uvicorn are imported when it is used: `serve_http`.
"""

from typing import TYPE_CHECKING, Any

from kvcore.api import ConfigError

if TYPE_CHECKING:
    from kvcore.config import HttpConfig
    from kvcore.service.http.app import Node
    from kvcore.service.http.runner import HttpServer

__all__ = ["HttpServer", "Node", "serve_http"]

_HOMES = {"HttpServer": "runner", "Node": "app"}


def serve_http(node: "Node", config: "HttpConfig") -> "HttpServer":
    """Serve on a thread and a loop of its own, from now on until `close`. Raises `ConfigError` when it cannot."""
    require()
    from kvcore.service.http.runner import HttpServer

    return HttpServer(node, config)


def require() -> None:
    """Raises `ConfigError` with the command that installs what is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"HTTP needs {error.name}: pip install 'kvcore[http]', or leave out server.http") from error


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        require()
        from importlib import import_module

        return getattr(import_module(f"kvcore.service.http.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
