"""Errors over HTTP: one JSON shape (RFC 9457), with the next step in its text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from kvcore.api import KVCoreError

if TYPE_CHECKING:
    from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"


class FaultModel(BaseModel):
    """One thing that is wrong with a request."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    where: str
    """The field or parameter, such as `l1` or `query.limit`."""

    detail: str
    """What is wrong with it, and what is allowed."""


class ProblemModel(BaseModel):
    """Why a request was not done."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """A fixed word for programs, such as `urn:kvcore:no-token`."""

    title: str
    """The status in words."""

    status: int
    """The HTTP status."""

    detail: str
    """What is wrong, and the next step."""

    faults: list[FaultModel] = []
    """Each of several faults."""


class Problem(KVCoreError):
    """A request is refused. Raised anywhere below a handler.

    Args:
        status: the HTTP status.
        kind: the fixed word of the problem's type.
        detail: what is wrong, and the next step.
        faults: each of several.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        faults: Sequence[FaultModel] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.faults = list(faults)
        self.headers = headers

    def response(self) -> "Response":
        """The response that says it."""
        from http import HTTPStatus

        from starlette.responses import Response

        model = ProblemModel(
            type=f"urn:kvcore:{self.kind}",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            faults=self.faults,
        )
        return Response(model.model_dump_json(), self.status, self.headers, MEDIA_TYPE)
