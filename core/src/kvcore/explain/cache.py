"""What an explanation is drawn from, whichever face the cache has: records, spaces, L1's table, and the tiers, which
are asked while it is being made."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.api import KVCoreError, ObjectKey
from kvcore.control import StorageManager
from kvcore.engine import CacheEngine, LocalStore, Space
from kvcore.engine.identity import Identity
from kvcore.l2 import Tier
from kvcore.observe.decisions import Decision, Decisions
from kvcore.observe.journal import Event, Journal

ASK_S = 2.0
"""How long a tier may take to say what it has."""
MAX_ASKED = 4096
"""Chunks that tiers are asked for, at the front."""


class Presence(NamedTuple):
    """Where the chunks of a prompt are now.

    Args:
        places: `l1` or a tier's name -> for each chunk, is it there in all the groups it must be in?
        silent: tiers that could not be asked -> why.
        known: so many chunks of the front were looked for in all places.
    """

    places: Mapping[str, Sequence[bool]]
    silent: Mapping[str, str]
    known: int

    @property
    def prefix(self) -> int:
        """Chunks of the front that some place has."""
        count = 0
        for row in zip(*self.places.values(), strict=True):
            if not any(row):
                break
            count += 1
        return count


class Cache:
    """One cache, asked for explanations.

    Args:
        engine: an `Engine` or an `ObjectStore`.
        name: as people know it.
    """

    def __init__(self, engine: Any, name: str = "") -> None:
        self.engine = engine
        self.name = name or str(getattr(engine, "name", ""))
        manager = getattr(engine, "manager", None)
        self.manager: StorageManager | None = manager if isinstance(manager, StorageManager) else None
        self.decisions: Decisions | None = _first("decisions", engine, manager)
        self.journal: Journal | None = _first("journal", engine, manager)

    def records(self) -> list[Decision]:
        """The lookups on record, newest first."""
        return [] if self.decisions is None else self.decisions.since()[::-1]

    @property
    def kept(self) -> int:
        """How many lookups are kept on record; 0 where there is no record."""
        return 0 if self.decisions is None else self.decisions.most

    @property
    def tokens(self) -> bool:
        """Whether token ids are on record."""
        return self.decisions is not None and self.decisions.tokens

    def since(self, records: Sequence[Decision]) -> float:
        """From when on every lookup is on record."""
        assert self.decisions is not None
        return records[-1].at if records and records[-1].seq > 1 else self.decisions.began

    def identities(self) -> dict[bytes, Identity]:
        """What the namespaces stand for that have been registered."""
        if isinstance(self.engine, CacheEngine | LocalStore):
            return self.engine.identities.all()
        spaces: Sequence[Space] = self.engine.spaces() if hasattr(self.engine, "spaces") else ()
        return {s.namespace: Identity(s.spec, s.chunk_tokens, "", s.tenant) for s in spaces}

    def past(self) -> dict[bytes, Identity]:
        """The same of other caches of this user, also of those that have ended."""
        kept = self.engine.identities.kept if isinstance(self.engine, CacheEngine | LocalStore) else None
        return {} if kept is None else kept.all()

    def events(self, chunk_hash: bytes, namespace: bytes | None = None) -> list[Event]:
        """What is on record of a chunk's objects, newest first."""
        return [] if self.journal is None else self.journal.of(chunk_hash, namespace)

    @property
    def writes(self) -> dict[str, str]:
        """Tier -> its `write:`."""
        if self.manager is None:
            return {}
        return {name: config.write for name, config in self.manager.tier_configs.items()}

    @property
    def named_tenants(self) -> set[str]:
        """See `StorageManager.named_tenants`."""
        return set() if self.manager is None else self.manager.named_tenants

    def speed(self, identity: Identity | None) -> float | None:
        """Tokens a second that the engine computes of this model's prompts, as measured."""
        if self.manager is None or identity is None:
            return None
        return self.manager.admission.speed(identity.spec.computed_as)

    # -- where things are now ----------------------------------------------------------------------------------------

    def in_l1(self, namespace: bytes, identity: Identity, hashes: Sequence[bytes]) -> list[bool]:
        """Which chunks L1 has, in all the groups that need them."""
        if self.manager is None or self.manager.closed:
            return [False] * len(hashes)
        tables = {s.group: s.objects for s in list(self.manager.layouts) if s.namespace == namespace}
        groups = needed(identity)
        if not tables.keys() >= set(groups):
            return [False] * len(hashes)
        return [all(h in tables[g] for g in groups) for h in hashes]

    def presence(self, namespace: bytes, identity: Identity, hashes: Sequence[bytes]) -> Presence | None:
        """Where the chunks are, in L1 and in each tier; None when only another process can tell. Waits for `ASK_S`."""
        if self.manager is None or self.manager.closed:
            return None
        groups, front = needed(identity), hashes[:MAX_ASKED]
        answers, silent = self.ask([ObjectKey(namespace, h, g) for g in groups for h in front])
        behind = [False] * (len(hashes) - len(front))
        places: dict[str, Sequence[bool]] = {}
        if self.manager.arena is not None:
            places["l1"] = self.in_l1(namespace, identity, hashes)
        for name, answer in answers.items():
            parts = [answer[at : at + len(front)] for at in range(0, len(answer), len(front))]
            places[name] = [all(column) for column in zip(*parts, strict=True)] + behind
        return Presence(places, silent, len(front if self.manager.tiers else hashes))

    def ask(self, keys: Sequence[ObjectKey]) -> tuple[dict[str, list[bool]], dict[str, str]]:
        """What each tier says it has of these; and the tiers that could not be asked, with why. Waits for `ASK_S`."""
        if self.manager is None or self.manager.closed or not keys:
            return {}, {}
        tiers = list(self.manager.tiers)
        silent = {t.name: t.breaker.cause or "its circuit breaker leaves it alone" for t in tiers if not t.usable}
        asked = {t.name: t for t in tiers if t.usable}
        if not asked:
            return {}, silent
        try:
            said = self.manager.loop.submit(_ask(asked, keys)).result(2 * ASK_S)
        except (TimeoutError, RuntimeError, KVCoreError) as error:
            why = f"the tiers' loop does not answer: {error or 'something blocks it'}"
            return {}, silent | dict.fromkeys(asked, why)
        silent |= {name: f"it has said nothing within {ASK_S:g} s" for name, answer in said.items() if answer is None}
        return {name: answer for name, answer in said.items() if answer is not None}, silent


def _first(name: str, *owners: Any) -> Any:
    """That of the first that has one."""
    return next((found for owner in owners if (found := getattr(owner, name, None)) is not None), None)


def needed(identity: Identity) -> list[int]:
    """The groups that need every chunk of a prefix: those with a window need only its end."""
    windows = [group.window_tokens for group in identity.spec.groups]
    return [g for g, window in enumerate(windows) if window is None] or list(range(len(windows)))


async def _ask(tiers: Mapping[str, Tier], keys: Sequence[ObjectKey]) -> dict[str, list[bool] | None]:
    asked = {name: asyncio.ensure_future(tier.ask(keys)) for name, tier in tiers.items()}
    await asyncio.wait(asked.values(), timeout=ASK_S)
    return {name: task.result() if task.done() and not task.cancelled() else None for name, task in asked.items()}
