"""What an explanation says, typed: the JSON of `kvcore explain` and of the routes behind it. Sizes are counts of
tokens, chunks or objects as named; times are UTC."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

MAX_TOKENS = 1 << 21
"""Of a prompt that is asked about."""
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]
Reason = Literal[
    "short_prompt",
    "short_prefix",
    "differs",
    "never_stored",
    "computed_since",
    "evicted",
    "expired",
    "cleared",
    "other_namespace",
    "dropped",
    "skipped",
    "held_back",
    "absent",
    "tier_down",
    "slow_tier",
    "timeout",
    "corrupt",
    "unreadable",
    "failed",
    "l1_full",
    "no_server",
    "refused",
    "lease_expired",
    "internal",
    "unknown",
]
"""Why a prefix ended where it did."""


class Model(BaseModel):
    """Closed and immutable; its docstrings are the descriptions. Built at its first use: a start shall be short."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


class EventModel(Model):
    """Something that happened to the object that was missed."""

    at: datetime
    place: str
    """`l1`, or a tier's name."""
    what: str
    """`stored`, `loaded`, `evicted`, `dropped`, `skipped`, `held_back` or `failed`."""
    reason: str
    """Why: the eviction policy, or a word as in docs/metrics.md."""


class DifferenceModel(Model):
    """A property in which two namespaces differ: KV is never mixed across it."""

    field: str
    """Such as `weights`, `lora`, `tenant`, `dtype` or `chunk_tokens`."""
    here: str
    there: str


class NearestModel(Model):
    """The request on record whose prompt has most in common with this one."""

    request: str
    at: datetime
    chunks: int
    """Whole chunks that both have in common."""
    tokens: int | None
    """Tokens that both have in common; None where the token ids of one are not on record."""
    here: list[int]
    """This prompt's token ids around the first that differs, which is at index `at_here`."""
    there: list[int]
    at_here: int
    """Index into `here` and `there` of the first differing token."""
    differences: list[DifferenceModel]
    """In what its namespace differs: empty where it is the same."""


class BreakModel(Model):
    """Where the usable prefix ended, and why."""

    chunk: int
    """Index of the first chunk that was not usable."""
    begin: int
    """Index of its first token."""
    end: int
    """Index behind its last token."""
    hash: str
    """The chunk's hash in hexadecimal; empty when there is no whole chunk."""
    reason: Reason
    text: str
    """The same as a sentence."""
    remedy: str
    """The next step; empty when there is none."""
    events: list[EventModel]
    """What is on record of this chunk's objects, newest first."""
    differences: list[DifferenceModel]
    """With `other_namespace`: in what."""


class FoundModel(Model):
    """Where chunks were."""

    held: int
    """Chunks that the engine itself still had."""
    chunks: int
    """Chunks beyond those that the cache offered."""
    places: dict[str, int]
    """`l1` or a tier's name -> objects that were found there."""
    misses: dict[str, int]
    """Reason, as in docs/metrics.md -> objects that were not usable."""


class NowModel(Model):
    """The same prompt, asked for now."""

    chunks: int
    """Chunks of the usable prefix now."""
    places: dict[str, int]
    """`l1` or a tier's name -> chunks of the prompt that are there now. One may be in several."""
    silent: dict[str, str]
    """Tiers that could not be asked, and why."""


class SavedModel(Model):
    """What the cache saved this request."""

    tokens: int | None
    """Tokens that the engine took from the cache instead of computing them; None where it does not say for which of its
    requests it takes them."""
    seconds: float | None
    """The time that the engine would have computed them in, by its measured speed; None while that is not known."""


class RecordModel(Model):
    """What the explanation is drawn from."""

    decisions_since: datetime | None
    """Lookups are on record from then on."""
    objects_since: datetime | None
    """What happened to objects is on record from then on; None where that record is another process's."""
    tokens: bool
    """Whether token ids are on record."""


class Explanation(Model):
    """Why a prompt was, or was not, found in the cache, and what that saved."""

    request: str
    """The engine's id of the request, or the number of the lookup, such as `no.12`, where the engine names none;
    empty for a prompt that nobody has asked for."""
    at: datetime
    """When it was looked up."""
    cache: str
    """Which cache says so."""
    model: str
    namespace: str
    """In hexadecimal."""
    adapter: str
    salt: str
    """A short hash of the request's cache salt."""
    tokens: int
    """Tokens of the prompt; 0 where nobody has said."""
    chunk_tokens: int
    chunks: int
    """Whole chunks of the prompt."""
    lookup_s: float
    """Seconds until the cache had answered."""
    found: FoundModel
    broke: BreakModel | None
    """None when every whole chunk was found."""
    nearest: NearestModel | None
    now: NowModel | None
    """None where only another process, such as the server, can be asked."""
    saved: SavedModel
    stored: int
    """Objects that were stored for this request."""
    record: RecordModel
    notes: list[str]
    """What the explanation cannot know, or what else there is."""


class Explanations(Model):
    """All lookups of a request, newest first, or one for a prompt."""

    explanations: list[Explanation]
    more: list[str]
    """Other requests on record whose ids match."""


def _not_too_many(given: object) -> object:
    if isinstance(given, list) and len(given) > MAX_TOKENS:
        raise PydanticCustomError("prompt_too_long", "{why}", {"why": too_long(len(given))})
    return given


def too_long(tokens: int) -> str:
    """What is said of a prompt that has so many."""
    return f"the prompt has {tokens:,} tokens: of one with more than {MAX_TOKENS:,} nothing can be told"


Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=MAX_TOKENS), BeforeValidator(_not_too_many)
]


class Question(Model):
    """A prompt to explain, as token ids; or only its chunk hashes, for one namespace."""

    tokens: Tokens = []
    model: str = ""
    """Its name, as the engine has it; of a folder the last part. Empty: of any that the cache serves."""
    adapter: str = ""
    """The LoRA adapter, as `NAME=PATH`."""
    salt: str = ""
    """The request's cache salt."""
    tenant: str = ""
    """Whose request it is, where that is not told by its salt."""
    hashes: list[Hex] = Field(default=[], max_length=1 << 17)
    """Instead of tokens, with `namespace`."""
    namespace: Hex = ""

    @model_validator(mode="after")
    def _either(self) -> "Question":
        if self.hashes and not self.namespace:
            raise ValueError("hashes are of one namespace: give `namespace`, too")
        return self


class Side(Model):
    """One of two prompts: a request on record, or token ids."""

    request: str = ""
    tokens: Tokens = []


class Comparison(Model):
    """Two prompts to compare."""

    a: Side
    b: Side
    model: str = ""


class DiffModel(Model):
    """How much of two prompts is the same to the cache."""

    a: str
    """The request's id; empty for a prompt."""
    b: str
    chunk_tokens: int
    """0 where no cache and nobody else has said."""
    tokens_a: int
    """Tokens of the prompt."""
    tokens_b: int
    chunks: int | None
    """Whole chunks that both share; None where that cannot be told."""
    tokens: int | None
    """Tokens that both share from the first on; None where the token ids of one are not on record."""
    here: list[int]
    """The token ids of `a` around the first that differs, which is at index `at_here`."""
    there: list[int]
    """Those of `b`."""
    at_here: int
    differences: list[DifferenceModel]
    """In what the namespaces of the two differ: then nothing is shared."""
    text: str
    """The same as a sentence."""
    remedy: str
