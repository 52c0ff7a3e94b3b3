"""Answers over the wire: server-sent events, or one JSON body; both end at once when the client leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from time import monotonic
from typing import Any

import anyio
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import PydanticSerializationError, to_json
from starlette.types import Receive, Scope, Send

from outrider.server.errors import error_body, error_response
from outrider.server.responses import ChatChunk, TextChunk
from outrider.server.state import ServerState

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LEFT = 499  # the status that logs know for a client that left
DONE = b"data: [DONE]\n\n"


def json_bytes(data: Any) -> bytes:
    """JSON as UTF-8, without spaces; half a surrogate pair, which UTF-8 does not have, becomes a question mark."""
    try:
        return to_json(data)
    except PydanticSerializationError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


class Chunks:
    """The events of one stream: all begin alike, so that only what is new is written for every token.

    They are what the models in responses.py would write, without the time that this takes.
    """

    def __init__(self, head: TextChunk | ChatChunk) -> None:
        """head: a chunk without a choice."""
        self._front = b"data: " + json_bytes(head.model_dump(exclude={"choices", "usage"}))[:-1] + b',"choices":['

    def of(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """One choice, and the usage so far where it is given."""
        more = b"]" if usage is None else b'],"usage":' + json_bytes(usage)
        return self._front + json_bytes(choice) + more + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, which tells the usage and no choice."""
        return self._front + b'],"usage":' + json_bytes(usage) + b"}\n\n"


class EventStream(Response):
    """Sends what a generator yields. Headers go out with the first event, so a refusal still has its own status."""

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, samples: int, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._state, self._samples, self._events = state, samples, events
        self._started = False
        self._last = monotonic()
        self._writing: float | None = None  # since when the client has been expected to read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generator until it ends, fails, or the client leaves or stops reading."""
        self._scope, self._send = scope, send
        finished = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_left, receive, tasks.cancel_scope)
            tasks.start_soon(self._beat)
            tasks.start_soon(self._watch, tasks.cancel_scope)
            finished = await self._pump(receive)
            tasks.cancel_scope.cancel()
        if not finished:
            self._state.left(scope)

    async def _pump(self, receive: Receive) -> bool:
        try:
            with self._state.gate.admit(self._samples):
                async with aclosing(self._events) as events:
                    async for block in events:
                        await self._write(block)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:
            await self._fail(error, receive)
        return True

    async def _write(self, block: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._last = self._writing = monotonic()
        await self._send({"type": "http.response.body", "body": block, "more_body": True})
        self._writing = None

    async def _fail(self, error: Exception, receive: Receive) -> None:
        """Tell an error: as a response of its own, or as the last event of a stream that has begun."""
        self._state.failed(self._scope, error)
        if not self._started:
            await error_response(error)(self._scope, receive, self._send)
            return
        body = event(error_body(error)) + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _beat(self) -> None:
        """Comments in long silences, so that proxies keep the connection."""
        interval = self._state.settings.heartbeat
        while True:
            await anyio.sleep(max(0.0, self._last + interval - monotonic()))
            if self._writing is not None:
                self._last = monotonic()  # a client that does not read needs no comment
            elif monotonic() - self._last >= interval:
                await self._write(b": waiting\n\n")

    async def _watch(self, tasks: anyio.CancelScope) -> None:
        """Give the stream up when its client has not read for too long: one timer for all writes, not one for each."""
        allowed = self._state.settings.write_timeout
        while self._writing is None or monotonic() - self._writing < allowed:
            await anyio.sleep(allowed - (0 if self._writing is None else monotonic() - self._writing))
        tasks.cancel()


async def answer(
    state: ServerState, request: Request, samples: int, work: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    """The JSON of `work`; the work is cancelled when the client leaves."""
    response: Response | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_left, request.receive, tasks.cancel_scope)
        try:
            with state.gate.admit(samples):
                response = JSONResponse(await work())
        except Exception as error:
            state.failed(request.scope, error)
            response = error_response(error)
        tasks.cancel_scope.cancel()
    if response is None:
        state.left(request.scope)
        return Response(status_code=LEFT)
    return response


async def _cancel_when_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
