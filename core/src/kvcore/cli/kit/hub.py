"""The hub's cache of this machine."""

from importlib.util import find_spec
from pathlib import Path


def cached(name: str, file: str) -> Path | None:
    """A file of the model of that name, where this user's cache of the Hugging Face hub has it. Asks nobody."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file)
    except (ImportError, ValueError):  # no hub's cache, or no name of it
        return None
    return Path(found) if isinstance(found, str) else None


def why_not(what: str) -> str:
    """Why `cached` has not found it."""
    if find_spec("huggingface_hub") is None:
        return "names on the hub need huggingface_hub, which is not installed here"
    return f"the hub's cache of this machine and user has no {what} of that name"
