"""Why a prefix ended at a chunk: from what was answered, and from what is on record of the chunk's objects."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from kvcore.explain import specs
from kvcore.explain.models import BreakModel, DifferenceModel, EventModel, Reason
from kvcore.explain.nearest import Nearest, Shifted
from kvcore.explain.words import BROKE, DROPPED, FAILED, SKIPPED
from kvcore.observe.decisions import Decision
from kvcore.observe.journal import Event

MAX_EVENTS = 20
KEEP_TOKENS = "`inspect: {tokens: true}` in the engine's kvcore.yaml and a restart of it, for requests after that"
COMPARE = "`kvcore diff @A.txt @B.txt --model DIR` with the texts of both prompts"


class Facts(NamedTuple):
    """What is known of the chunk that was not usable.

    Args:
        decision: what was answered.
        chunk: its index.
        events: of its objects in this namespace, newest first.
        nearest: the earlier request that has most in common. differs: in what its namespace differs. shift: one that
            would have much in common, were it not for what stands in front.
        elsewhere: where the same chunk is under another namespace, if anywhere. other: in what that differs.
        since: from when on events are on record; None where they are not.
        writes: each tier's `write:`, in order.
        compared: whether the chunk could be compared with every earlier request on record of this namespace.
        separate: whether there are earlier requests of other namespaces.
    """

    decision: Decision
    chunk: int
    events: Sequence[Event]
    nearest: Nearest | None = None
    shift: Shifted | None = None
    differs: Sequence[DifferenceModel] = ()
    elsewhere: str = ""
    other: Sequence[DifferenceModel] = ()
    since: float | None = None
    writes: Mapping[str, str] = {}
    compared: bool = False
    separate: bool = False


class Cause(NamedTuple):
    """Why, as a word, a sentence and the next step."""

    reason: Reason
    text: str
    remedy: str = ""
    differences: Sequence[DifferenceModel] = ()


def explain_break(facts: Facts) -> BreakModel:
    """Why the usable prefix ended at this chunk."""
    decision, chunk = facts.decision, facts.chunk
    size = decision.chunk_tokens
    chunk_hash = decision.hash_of(chunk)
    cause = _cause(facts)
    events = [
        EventModel(at=when(e.at), place=e.place, what=e.what, reason=" ".join(filter(None, (e.reason, e.detail))))
        for e in facts.events[:MAX_EVENTS]
    ]
    return BreakModel(
        chunk=chunk,
        begin=chunk * size,
        end=min((chunk + 1) * size, decision.asked.tokens or (chunk + 1) * size),
        hash=chunk_hash.hex() if chunk_hash else "",
        reason=cause.reason,
        text=cause.text,
        remedy=cause.remedy,
        events=events,
        differences=list(cause.differences),
    )


def _cause(facts: Facts) -> Cause:
    decision = facts.decision
    if not decision.chunks:
        return _too_short(decision)
    if decision.broke not in ("", "absent"):
        words = BROKE.get(decision.broke, FAILED)
        tier = decision.blame or "a tier"
        if decision.broke == "evicted_from_tier" and (left := _evicted_just_then(facts)) is not None:
            return left
        return Cause(words.reason, words.text.format(tier=tier, word=decision.broke), words.remedy)
    before = [e for e in facts.events if e.at <= decision.at]
    after = [e for e in facts.events if e.at > decision.at and e.what == "stored"]
    if before:
        return _gone(facts, before)
    if facts.elsewhere:
        return Cause(
            "other_namespace",
            f"is not there for this request, but it is in {facts.elsewhere} under another namespace, which differs in "
            f"{specs.told(list(facts.other))}",
            "start the engines alike in this, if they are to share KV",
            facts.other,
        )
    return _parted(facts) or _since(facts, after) or _never(facts, after)


def _too_short(decision: Decision) -> Cause:
    size, tokens = decision.chunk_tokens, decision.asked.tokens
    what = f"has {count(tokens, 'token')}, less" if tokens else "is shorter"
    text = f"the prompt {what} than one chunk of {size}: only whole chunks are kept"
    return Cause("short_prompt", text, "nothing; a smaller `chunk_tokens`, if many prompts share so short a beginning")


# -- it was there --------------------------------------------------------------------------------------------------


def _gone(facts: Facts, before: Sequence[Event]) -> Cause:
    """It has been in some place, or was to be: what became of it, place by place."""
    at = facts.decision.at
    last: dict[str, Event] = {}
    for event in before:
        last.setdefault(event.place, event)
    places = [p for p in dict.fromkeys(["l1", *facts.writes, *last]) if p in last]
    told = [(last[p].at, cause) for p in places if (cause := _left(last[p], at)) is not None]
    told += [(e.at, _too_old(e)) for p in places if (e := _deleted_since(facts, last[p])) is not None]
    if not told:
        heard = f"was last heard of in {before[0].place} ({ago(at - before[0].at)} before)"
        return Cause("unknown", f"{heard}: it has left without a word, as when another process deletes it")
    newest = max(told, key=lambda entry: entry[0])[1]
    remedies = dict.fromkeys(c.remedy for _, c in told if c.remedy)
    text = "; it ".join(c.text for _, c in told)
    if not facts.writes and newest.reason == "evicted":
        text += "; no tier is configured that would have kept it"
        remedies = dict.fromkeys(["a larger `l1.size`, or a tier in `l2` for what leaves L1"])
    return Cause(newest.reason, text, "; or ".join(remedies))


def _left(event: Event, at: float) -> Cause | None:
    """Why it is not in this place, by the last that happened to it there; None while it should be."""
    place, before = event.place, f"{ago(at - event.at)} before"
    where = "l1" if place == "l1" else f"tier {place}"
    if event.what == "evicted":
        return _evicted(event, where, before)
    if event.what == "held_back":
        return Cause(
            "held_back",
            f"was held back from {where}, which has `write: reused`: nobody had asked for it again",
            f"`write: all` of {where}, if such prompts come back once",
        )
    if event.what == "dropped":
        why, remedy = DROPPED.get(event.reason, (event.reason, ""))
        return Cause("dropped", f"was not written to {where} {before}: {why}", remedy)
    if event.what == "skipped":
        why, remedy = SKIPPED.get(event.reason, (event.reason, ""))
        return Cause("skipped", f"was not stored in {where} {before}: {why}", remedy)
    if event.what == "failed":
        op = event.detail or "store"
        words = BROKE.get(event.reason, FAILED)
        reason: Reason = words.reason if op == "load" else "failed"
        how = f"loaded from {where}" if op == "load" else f"stored in {where}"
        return Cause(reason, f"could not be {how} {before} ({event.reason})", words.remedy)
    return None


def _deleted_since(facts: Facts, last: Event) -> Event | None:
    """What a place deleted as too old, at the question or soon after: until then it only is not found."""
    if last.what not in ("stored", "loaded"):
        return None
    after = [e for e in facts.events if e.place == last.place and e.at > facts.decision.at]
    return after[-1] if after and (after[-1].what, after[-1].reason) == ("evicted", "expired") else None


def _too_old(event: Event) -> Cause:
    where = "l1" if event.place == "l1" else f"tier {event.place}"
    return Cause("expired", f"was no longer found in {where}: its `ttl` was over", "a longer `ttl`")


def _evicted_just_then(facts: Facts) -> Cause | None:
    """A tier that said it had it has evicted it since, for room."""
    tiers = facts.decision.blame.split(",")
    for event in facts.events:
        if event.place in tiers and event.what != "failed":
            if (event.what, event.reason) != ("evicted", "room"):
                return None
            text = f"was in {event.place} when it was asked, and evicted before it was loaded, to make room"
            return Cause("evicted", text, f"a larger `capacity` of tier {event.place}")
    return None


def _evicted(event: Event, where: str, before: str) -> Cause:
    if event.reason == "expired":
        return Cause("expired", f"left {where} {before}: its `ttl` was over", "a longer `ttl`")
    if event.reason == "cleared":
        return Cause("cleared", f"was deleted from {where} {before}, on request")
    if event.reason == "unused":
        return Cause("evicted", f"left {where} {before}: it had been loaded and was not used, or has moved to a tier")
    policy = f" by `{event.detail}`" if event.detail else ""
    larger = "a larger `l1.size`" if event.place == "l1" else f"a larger `capacity` of {where}"
    return Cause("evicted", f"was evicted from {where} {before}{policy}, to make room", larger)


# -- it was never there --------------------------------------------------------------------------------------------


def _parted(facts: Facts) -> Cause | None:
    """The nearest earlier request ends the shared prefix before the end of this chunk, or has another namespace."""
    near, decision = facts.nearest, facts.decision
    if facts.shift is not None and not facts.chunk:
        return _pushed(facts.shift, decision)
    if near is None:
        return None
    size, other = decision.chunk_tokens, near.decision
    name = _name(near.decision, decision)
    behind = (facts.chunk + 1) * size
    shared = near.common(size)
    same = shared >= behind and near.chunks <= facts.chunk
    if facts.differs and same:
        fields = specs.told(list(facts.differs))
        begins = "has the same tokens" if near.tokens is not None else f"begins with the same {count(shared, 'token')}"
        text = f"was never stored for this request; {name} {begins}, but differs in {fields}"
        return Cause("other_namespace", text, "give both the same, if KV may be shared", facts.differs)
    if same:
        text = f"is not the same as in any prompt before: {name} has the same tokens, but not the same media"
        return Cause("differs", text, "nothing: images and the like are part of a prompt")
    if facts.differs or shared < facts.chunk * size or near.chunks > facts.chunk:
        return None
    if near.tokens is None:
        ends = other.chunks <= facts.chunk
        if ends and not facts.chunk:
            return None
        why = "ended in it" if ends else "has other tokens in it"
        text = f"is not the same as in any prompt before: {name} shares the {facts.chunk} chunks before it, and {why}"
        return Cause("differs", text, f"{_KEEP_FRONT}; {COMPARE} names the first token that differs")
    if near.tokens == other.asked.tokens:
        text = f"is not the same as in any prompt before: {name} ended after the first {shared:,} tokens"
    else:
        text = f"is not the same as in any prompt before: token {shared:,} is another than in {name}"
    if not facts.chunk:
        text = f"{text}; the {shared:,} tokens that both share are less than one chunk of {size}"
        return Cause("short_prefix", text, "put what varies last; a smaller `chunk_tokens`")
    return Cause("differs", text, _KEEP_FRONT)


def _pushed(shift: Shifted, decision: Decision) -> Cause:
    name = _name(shift.decision, decision)
    much = count(shift.tokens, "token")
    if shift.mine:
        text = (
            f"begins with {much} that {name} does not have, and goes on as that does: what stands in front changes all"
        )
    else:
        text = f"is what {name} has behind its first {much}: what stands in front there changes all"
    return Cause("short_prefix", text, "put what varies (a date, a name) behind what prompts share")


_KEEP_FRONT = "nothing, if the prompts are meant to differ; else put what varies (a date, a name) last"


def _since(facts: Facts, after: Sequence[Event]) -> Cause | None:
    """An earlier request had the same chunk, and had not stored it yet."""
    near, decision = facts.nearest, facts.decision
    if facts.since is None or near is None or near.chunks <= facts.chunk:
        return None
    name, before = _name(near.decision, decision), ago(decision.at - near.decision.at)
    if after:
        text = (
            f"was not there yet: {name} had asked for it {before} before, and it was stored {_later(after, decision)}"
        )
        return Cause("computed_since", text)
    return Cause(
        "never_stored", f"was never stored: {name} had asked for it {before} before, but nobody has stored it since",
        "does an engine store at all? `kv_role: kv_consumer` does not; look at `kvcore_store_skipped_chunks_total`",
    )  # fmt: skip


def _never(facts: Facts, after: Sequence[Event]) -> Cause:
    decision = facts.decision
    if facts.since is None:
        return Cause("absent", "is in no tier; what became of objects is on record where the cache is, at the server")
    if decision.at < facts.since:
        return Cause("unknown", "was in no place, and what happened before is not on record any more")
    text = _new(facts) + f" (the record begins {ago(decision.at - facts.since)} earlier)"
    if after:
        text += f"; it was stored {_later(after, decision)}"
    if not decision.seq:
        return Cause("never_stored", text)
    if facts.nearest is not None and (other := name_of(facts.nearest.decision)):
        compare = f"`kvcore diff {name_of(decision)} {other}`"
    else:
        compare = COMPARE
    remedy = f"nothing, if the prompt is new; else {compare} names the first token that differs"
    if decision.asked.ids is None and decision.asked.tokens:
        remedy += f"; or {KEEP_TOKENS}: then explain names it"
    return Cause("never_stored", text, remedy)


def _new(facts: Facts) -> str:
    """That nobody had asked for these tokens before, where the record can tell, or else for this chunk."""
    size, near = facts.decision.chunk_tokens, facts.nearest
    if not facts.compared or (near is not None and near.common(size) > facts.chunk * size):
        text = "is new to the cache: it was not stored before"
    else:
        whose = " of the same model, adapter and salt" if facts.separate else ""
        begin = f"with the same {count((facts.chunk + 1) * size, 'token')}"
        text = f"is new to the cache: no earlier request on record{whose} began {begin}"
    if near is not None and (shared := near.common(size)):
        text += f"; the nearest, {_name(near.decision, facts.decision)}, shares the first {count(shared, 'token')}"
    return text


def _later(after: Sequence[Event], decision: Decision) -> str:
    return f"in {after[-1].place} {ago(after[-1].at - decision.at)} after it"


def _name(other: Decision, decision: Decision) -> str:
    return f"request {name}" if (name := name_of(other)) else f"a request {ago(decision.at - other.at)} before"


def name_of(decision: Decision) -> str:
    """The engine's id of the request, or where it gave none the number of the lookup; empty for a prompt."""
    return decision.asked.id or (f"no.{decision.seq}" if decision.seq else "")


def when(seconds: float) -> datetime:
    """Seconds since the epoch as a time of the calendar."""
    return datetime.fromtimestamp(seconds, UTC)


def count(number: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def ago(seconds: float) -> str:
    """A span of time for people."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.1f} s"
