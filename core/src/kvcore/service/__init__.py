"""One cache for all engines of a machine: the server, and the engine's side of it. `open_engine` is what engine plugins
call."""

from kvcore.service.open import open_engine

__all__ = ["open_engine"]
