"""What this user may do to an open cache over its socket: have it forget objects, and keep some in L1 for a time."""

import asyncio
from datetime import UTC, datetime, timedelta

from pydantic import Field, model_validator

from kvcore.api import ConfigError
from kvcore.engine import CacheEngine
from kvcore.explain.cache import Cache
from kvcore.explain.explain import NotOnRecord
from kvcore.explain.models import Model, Question
from kvcore.explain.prompt import looked_for
from kvcore.service.inspect.models import ClearedModel, ClearModel, Hex
from kvcore.service.inspect.stored import Turns
from kvcore.service.inspect.subject import Subject

MAX_PIN_S = 30 * 86400.0


class PinModel(Question):
    """A prompt whose chunks are to stay in L1, or `prefix`."""

    prefix: Hex = Field(default="", max_length=128)
    """Instead of tokens: a prefix on record, by the beginning of its hash as `/hot` and `kvcore top` show it."""
    seconds: float = Field(ge=0, le=MAX_PIN_S)
    """For how long from now; 0 ends a pin."""

    @model_validator(mode="after")
    def _what(self) -> "PinModel":
        if bool(self.prefix) == bool(self.tokens or self.hashes):
            raise ValueError("give either the tokens of a prompt or the prefix")
        if self.prefix and len(self.prefix) < 8:
            raise ValueError("a prefix has at least 8 characters")
        return self


class PinnedModel(Model):
    """What stays."""

    namespace: str
    model: str
    tenant: str
    chunks: int
    """Of the prompt or prefix."""
    chunk_tokens: int
    pinned: int
    """Of these, those at the front that are kept now. The others are not in L1, or there is no more room for pins."""
    ended: int
    """Pins that were ended."""
    until: datetime | None
    notes: list[str]
    """What else is to be known, such as that the model was taken for another."""


def clear(subject: Subject, wanted: ClearModel) -> ClearedModel:
    """Forget objects: see `ClearModel`. Half a minute at most. Raises `ConfigError` or `Problem`."""
    from kvcore.service.inspect import clearing  # it is seldom needed

    engine = _engine(subject)
    tiers = {tier.name: tier for tier in list(engine.manager.tiers)}
    names = list(tiers) if wanted.tiers is True else wanted.tiers or []
    if unknown := [name for name in names if name not in tiers]:
        raise ConfigError(f"no tier is named {unknown[0]!r}: there are {', '.join(tiers) or 'none'}")
    chosen = [tiers[name] for name in dict.fromkeys(names)]
    return asyncio.run(clearing.clear(engine, wanted, chosen, Turns(), asyncio.to_thread))


def pin(subject: Subject, wanted: PinModel) -> PinnedModel:
    """Keep the chunks of a prompt that are in L1, from the front on. Raises `ConfigError`; `NotOnRecord`."""
    engine = _engine(subject)
    if wanted.prefix:
        namespace, hashes = _on_record(subject, wanted.prefix, bytes.fromhex(wanted.namespace))
        notes = list[str]()
    else:
        found = looked_for(Cache(engine, subject.name), wanted)
        namespace, hashes, notes = found.namespace, list(found.hashes), list(found.notes)
    space = engine.registered.get(namespace)
    if space is None:
        raise ConfigError("no engine uses the model just now: pin it when one does")
    if not hashes:
        raise ConfigError(f"the prompt is shorter than a chunk, which has {space.chunk_tokens} tokens")
    pinned = engine.pin(space, hashes, wanted.seconds) if wanted.seconds else 0
    ended = 0 if wanted.seconds else engine.unpin(space, hashes)
    return PinnedModel(
        namespace=namespace.hex(),
        model=space.spec.model,
        tenant=subject.tenant(space.tenant),
        chunks=len(hashes),
        chunk_tokens=space.chunk_tokens,
        pinned=pinned,
        ended=ended,
        until=datetime.now(UTC) + timedelta(seconds=wanted.seconds) if pinned else None,
        notes=notes,
    )


def _engine(subject: Subject) -> CacheEngine:
    if subject.manager is None:
        raise ConfigError(f"{subject.name} uses the cache of a server: ask that one")
    if not isinstance(subject.cache, CacheEngine):
        raise ConfigError(f"{subject.name} has no L1: `kvcore store rm` deletes what tiers hold")
    return subject.cache


def _on_record(subject: Subject, begin: str, namespace: bytes) -> tuple[bytes, list[bytes]]:
    """The namespace and the chunks of a prefix, of whose last one the hash begins so. `namespace`: it, or any."""
    found: dict[tuple[bytes, bytes], list[bytes]] = {}
    headless = False
    for decision in subject.decisions.since():
        for at, chunk_hash in enumerate(decision.hashes):
            if chunk_hash.hex().startswith(begin) and namespace in (b"", decision.namespace):
                headless = headless or bool(decision.begin)
                if not decision.begin:
                    found[decision.namespace, chunk_hash] = list(decision.hashes[: at + 1])
    if len(found) > 1:
        names = ", ".join(sorted({name.hex() for name, _ in found}))
        text = f"{len(found)} prefixes on record have a hash that begins with {begin}, in the namespace {names}"
        raise ConfigError(f"{text}: give more of the hash, or the namespace")
    for (owner, _), hashes in found.items():
        return owner, hashes
    if headless:
        raise ConfigError("what is before it is not on record: its engine held that itself. Give the prompt instead")
    raise NotOnRecord(f"no request on record has a chunk whose hash begins with {begin}: see `kvcore top`")
