"""How the control API says that something did not work: one JSON object for every kind of fault.

    {"error": "one line", "given": "what was given or null", "expected": "the rule or null"}

In the spirit of RFC 9457, with its media type. The HTTP status says who has to act: 4xx whoever
asked, 5xx whoever runs the cluster.
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...errors import DeadlineExceeded, InvalidArgument, NodeError, StoreError, shorten

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class Conflict(StoreError):
    """Somebody else changed the same thing at the same time, and won."""

    def __init__(self, what: str, *, given: str, expected: str) -> None:
        super().__init__(f"{what}: {given}; {expected}")
        self.given = given
        self.expected = expected


def problem(status: int, error: str, *, given: object = None, expected: object = None) -> Response:
    """The answer for one fault."""
    values = {
        "error": error,
        "given": None if given is None else shorten(given),
        "expected": None if expected is None else str(expected),
    }
    return Response(json.dumps(values).encode(), status_code=status, media_type=MEDIA_TYPE)


def install_problems(app: FastAPI) -> None:
    """Let every fault of the application end as a problem."""
    app.add_exception_handler(StoreError, _answer_store_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_mistake)


async def _answer_store_error(request: Request, error: Exception) -> Response:
    text = str(error)
    if isinstance(error, InvalidArgument):
        return problem(
            HTTPStatus.BAD_REQUEST, error.what, given=error.given, expected=error.expected
        )
    if isinstance(error, Conflict):
        return problem(HTTPStatus.CONFLICT, text, given=error.given, expected=error.expected)
    if isinstance(error, DeadlineExceeded):
        return problem(HTTPStatus.GATEWAY_TIMEOUT, text)
    if isinstance(error, NodeError):
        return problem(HTTPStatus.BAD_GATEWAY, text)
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, text)


async def _answer_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first.get("loc", ()))
    return problem(
        HTTPStatus.BAD_REQUEST,
        f"the request is not what this route takes: {where or 'body'}",
        given=_shown(first.get("input")),
        expected=first.get("msg", "see /docs"),
    )


def _shown(given: object) -> str:
    """What was sent, in one line: a body that is no JSON as the text that it is."""
    return repr(given.decode(errors="replace") if isinstance(given, bytes) else given)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    given = f"{request.method} {request.url.path}"
    answer = problem(error.status_code, error.detail, given=given, expected="a route of /docs")
    answer.headers.update(error.headers or {})
    return answer


async def _answer_mistake(request: Request, error: Exception) -> Response:
    log.error("control: mistake in %s %s", request.method, request.url.path, exc_info=error)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "a mistake in the server; its log has more")
