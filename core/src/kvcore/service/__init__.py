"""One cache for all engines of a machine: the server, and the engine's side of it. What engine plugins call is
`open_engine` or `open_store`."""

from kvcore.service.open import open_engine, open_store

__all__ = ["open_engine", "open_store"]
