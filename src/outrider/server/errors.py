"""How errors look over HTTP: one table from the exception tree to a status and an OpenAI error body."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from outrider.errors import (
    CapacityError,
    ConfigError,
    OutriderError,
    PromptTooLongError,
    RequestError,
    UnsupportedError,
)

RETRY_SECONDS = 1
UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "none", "NamedTool"})  # pydantic names them in paths
# Most specific first: status, OpenAI error type, OpenAI error code.
TABLE: tuple[tuple[type[Exception], int, str, str], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (UnsupportedError, 400, "invalid_request_error", "unsupported_value"),
    (RequestError, 400, "invalid_request_error", "invalid_value"),
    (ConfigError, 400, "invalid_request_error", "invalid_value"),
    (CapacityError, 503, "overloaded_error", "capacity_exceeded"),
    (OutriderError, 500, "server_error", "engine_error"),
    (Exception, 500, "server_error", "internal_error"),
)
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """A refusal that only the HTTP layer knows: keys, sizes, rates, unknown models."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def type(self) -> str:
        """OpenAI's error type of the status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's error object of any exception; what is not ours is not told to the client."""
    _, kind, code = classify(error)
    ours = isinstance(error, (OutriderError, HttpError))
    message = str(error) if ours else "internal error; the server's log has the details under this request's id"
    param = getattr(error, "param", None) or getattr(error, "field", None)
    return {"error": {"message": message, "type": kind, "param": param if ours else None, "code": code}}


def classify(error: BaseException) -> tuple[int, str, str]:
    """Status, type and code of an exception."""
    if isinstance(error, HttpError):
        return error.status, error.type, error.code
    return next((status, kind, code) for cls, status, kind, code in TABLE if issubclass(type(error), cls))


def error_response(error: BaseException) -> JSONResponse:
    """The whole answer for an exception."""
    status = classify(error)[0]
    seconds = getattr(error, "retry_after", None)
    if seconds is None and status in (429, 503):
        seconds = RETRY_SECONDS
    headers = {} if seconds is None else {"retry-after": str(max(1, round(seconds)))}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def from_validation(error: RequestValidationError, known: Sequence[str]) -> HttpError:
    """The first thing wrong with a body, told by the field's name; `known` are the fields that exist."""
    first = dict(min(error.errors(), key=_rank))
    param = first.get("ctx", {}).get("field") or _path(first["loc"])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(param, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return HttpError(400, "unknown_parameter", f"unknown field {param!r}{hint}", param)
    if first["type"] == "missing" and not param:
        return HttpError(400, "invalid_json", "the body is empty; send a JSON object")
    if first["type"] == "missing":
        return HttpError(400, "missing_required_parameter", f"the field {param!r} is missing", param)
    if first["type"] == "unsupported":
        return HttpError(400, "unsupported_parameter", first["msg"], param)
    if first["type"] == "json_invalid":
        return HttpError(400, "invalid_json", "the body is not valid JSON")
    message = first["msg"][0].lower() + first["msg"][1:]
    return HttpError(400, "invalid_value", f"{param or 'the body'}: {message}", param or None)


def _path(loc: Sequence[Any]) -> str:
    """A field's path as users write it: without the part "body" and without the names of union members."""
    parts = [str(part) for part in loc if part != "body"]
    return ".".join(p for p in parts if (p.isidentifier() or p.isdigit()) and p not in UNION_MEMBERS)


def _rank(error: Any) -> int:
    """A value that a union refuses gives an error per member: the most telling one comes first."""
    return {"unsupported": 0, "extra_forbidden": 1}.get(error["type"], 2)
