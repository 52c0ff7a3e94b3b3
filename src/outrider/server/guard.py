"""The outermost layer, as plain ASGI: request ids, keys, hosts, rates, body limits, and one log line per request."""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from uuid import uuid4

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import HttpError, error_response
from outrider.server.settings import Settings
from outrider.server.state import ServerState

log = logging.getLogger("outrider.server.access")
OPEN = frozenset({"/", "/health", "/static/page.css", "/static/page.js"})  # need no key: they tell nothing private
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Wraps the application; everything that can be refused without understanding the request is refused here."""

    def __init__(self, app: ASGIApp, state: ServerState, keys: Sequence[bytes]) -> None:
        """`keys`: accepted API keys; empty lets everybody in."""
        self._app, self._state, self._keys = app, state, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _record(scope, headers)
        scope.setdefault("state", {})["record"] = record
        with self._state.tracer.span(f"{scope['method']} {scope['path']}", headers, record):
            try:
                await self._serve(scope, headers, receive, _stamped(send, record))
            finally:
                _log(record)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check_host(headers)
            client = self._client(scope, headers)
            if scope["method"] == "POST":
                self._state.rate.check(client)
                receive = await read_body(headers, receive, self._state.settings)
        except HttpError as error:
            self._state.failed(scope, error)
            await error_response(error)(scope, receive, send)
            return
        except ClientLeftError:
            self._state.left(scope)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page elsewhere must not reach a local server through a name that it made point here."""
        hosts = self._state.settings.hosts
        if not hosts:
            return
        name = re.sub(r":\d+$", "", headers.get("host", ""))
        if name.lower() not in hosts:
            raise HttpError(403, "host_refused", "this Host header is not accepted; add it to allowed_hosts")

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Who asks, for the rate limit: the key's number or the address. Raises HttpError 401."""
        address = scope["client"][0] if scope.get("client") else "local"
        if not self._keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return str(address)
        kind, _, given = headers.get("authorization", "").partition(" ")
        found = -1
        for number, key in enumerate(self._keys):  # every key is compared, so that time tells nothing
            if hmac.compare_digest(given.strip().encode("latin-1"), key):
                found = number
        if kind.lower() != "bearer" or found < 0:
            raise HttpError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
        scope["state"]["record"]["key"] = found
        return f"key {found}"


async def read_body(headers: Headers, receive: Receive, settings: Settings) -> Receive:
    """Read a JSON body within its limits and give it back as a `receive`.

    Raises HttpError 400, 408, 413 or 415. After the body `receive` goes on to tell when the client leaves.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "unsupported_media_type", "send JSON with Content-Type: application/json")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > settings.max_body_bytes:
        raise _too_large(settings)
    body = bytearray()
    more = True
    with anyio.move_on_after(settings.read_timeout) as scope:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > settings.max_body_bytes:
                raise _too_large(settings)
    if scope.cancelled_caught:
        raise HttpError(408, "request_timeout", f"the body did not arrive within {settings.read_timeout:g} s")
    check_json(bytes(body), settings.max_json_depth)
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def check_json(body: bytes, max_depth: int) -> None:
    """Refuse what a JSON parser should not be bothered with: bad UTF-8, lone surrogates, deep nesting.

    Each pass removes the innermost pairs of brackets, so `max_depth` passes remove all that are not too deep.
    """
    try:
        body.decode("utf-8")
        if b"\\u" in body and re.search(rb"\\u[dD][89a-fA-F]", body):
            json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise HttpError(
            400, "invalid_unicode", "the body is not valid UTF-8, or has half of a surrogate pair"
        ) from None
    except (ValueError, RecursionError):
        raise HttpError(400, "invalid_json", "the body is not valid JSON") from None
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    brackets = b"".join(outside).translate(None, NOT_BRACKETS)
    for _ in range(max_depth):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if brackets:
        raise HttpError(400, "too_deep", f"the JSON nests deeper than {max_depth} levels, or its brackets do not match")


class ClientLeftError(Exception):
    """The client left before its request was whole."""


def _too_large(settings: Settings) -> HttpError:
    return HttpError(413, "body_too_large", f"the body is larger than this server's {settings.max_body_bytes} bytes")


def _record(scope: Scope, headers: Headers) -> dict[str, Any]:
    given = headers.get("x-request-id", "")
    identity = given if REQUEST_ID.fullmatch(given) else uuid4().hex
    return {"request_id": identity, "start": perf_counter(), "method": scope["method"], "path": scope["path"][:256]}


def _stamped(send: Send, record: dict[str, Any]) -> Send:
    """Add the request's id and the security headers to its response, and note the status."""

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            record["status"] = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = record["request_id"]
            for name, value in SECURITY.items():
                headers.setdefault(name, value)
        await send(message)

    return stamped


def _log(record: dict[str, Any]) -> None:
    quiet = record["path"] in ("/health", "/metrics", "/stats")
    fields = {name: value for name, value in record.items() if value is not None and name != "start"}
    fields["duration_ms"] = round(1e3 * (perf_counter() - record["start"]), 2)
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
