"""Why prompts were found or not, as the doors of a cache tell it."""

from pydantic import Field

from kvcore.explain.compare import compare
from kvcore.explain.explain import explain_prompt, explain_request
from kvcore.explain.models import Comparison, DiffModel, Explanations, Model, Question
from kvcore.service.inspect.subject import Subject


class ExplainQuery(Model):
    """Which request."""

    request: str = Field(min_length=1, max_length=500)
    """Its id as the engine has it, or a part of it."""


def request(subject: Subject, query: ExplainQuery) -> Explanations:
    """Why a request on record hit or missed. Raises `NotOnRecord`."""
    return explain_request(_recorded(subject), query.request, subject.name)


def prompt(subject: Subject, question: Question) -> Explanations:
    """What a lookup of a prompt would find now, and why no more."""
    return explain_prompt(_recorded(subject), question, subject.name)


def diff(subject: Subject, asked: Comparison) -> DiffModel:
    """How much two prompts have in common."""
    return compare(_recorded(subject), asked, subject.name)


def _recorded(subject: Subject) -> object:
    """The face that has the record: an object store of a server's has it in its connection."""
    found = hasattr(subject.cache, "decisions") or subject.manager is not None
    return subject.cache if found else subject.clients[0]
