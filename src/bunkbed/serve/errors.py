"""Errors as answers: one line of text as ``{"error": ...}``, with a status that says whose mistake it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from bunkbed.core.typed import shortened
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.serve.source import BadRequest

_log = logging.getLogger("bunkbed.serve")
#: Seconds between two lines of the log about rows that cannot be read.
_LOG_EVERY_S = 10.0


class ErrorBody(BaseModel):
    """Why a request was not answered."""

    error: str


#: The errors of every path, for its description.
ERRORS: dict[int | str, Json] = {
    "4XX": {"model": ErrorBody, "description": "A mistake in the request"},
    422: {"model": ErrorBody, "description": "The body has another form"},
    503: {"model": ErrorBody, "description": "The rows cannot be read now, or too many requests at once"},
}


def answer_errors(app: FastAPI, fields: Mapping[str, list[str]]) -> None:
    """Make an application answer every error as `ErrorBody`.

    Args:
        fields: path -> what its body may have.
    """
    logged_s = -_LOG_EVERY_S

    def answer(status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": text}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(422, _describe(error.errors()[0], fields.get(request.url.path, [])))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(BadRequest)
    async def bad(_: Request, error: BadRequest) -> JSONResponse:
        return answer(error.status, str(error))

    async def mistaken(_: Request, error: Exception) -> JSONResponse:
        return answer(400, str(error))

    for kind in (IndexError, ValueError):
        app.add_exception_handler(kind, mistaken)

    async def unusable(_: Request, error: Exception) -> JSONResponse:
        nonlocal logged_s
        if time.monotonic() >= logged_s + _LOG_EVERY_S:  # not for each request of an outage
            logged_s = time.monotonic()
            _log.error("%s", error)
        return answer(503, "the rows cannot be read now; the server's log says why")

    for failure in (BunkbedError, OSError, MemoryError):
        app.add_exception_handler(failure, unusable)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return answer(500, "internal error; the server's log says where")  # Starlette raises it again, for the log


def _describe(error: Mapping[str, object], fields: list[str]) -> str:
    """Return what is wrong with a body, by pydantic's error."""
    loc, context = error["loc"], error.get("ctx")
    assert isinstance(loc, tuple)
    place = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in loc[1:2] + loc[2:3])
    if error["type"] == "json_invalid":
        reason = context["error"] if isinstance(context, Mapping) else error["msg"]
        return f"the body is not JSON, at character {loc[-1]}: {reason}"
    if loc == ("body",) and error["type"] in ("missing", "model_attributes_type", "dict_type"):
        return f"the body must be a JSON object with {', '.join(fields)}; send content-type: application/json"
    if error["type"] == "extra_forbidden":
        return f"there is no field {place!r}; there are {', '.join(fields)}"
    if error["type"] == "missing":
        return f"{place} is missing"
    if not place:
        return f"the body: {error['msg']}"
    reason = error["msg"] if len(loc) <= 3 else "Input should be an integer or a string"  # pydantic's last part: a type
    return f"{place} is {shortened(error.get('input'))}: {reason}"
