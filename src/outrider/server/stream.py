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
from starlette.types import Receive, Scope, Send

from outrider.server.errors import error_body, error_response
from outrider.server.state import ServerState

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LEFT = 499  # the status that logs know for a client that left


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what a generator yields. Headers go out with the first event, so a refusal still has its own status."""

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, samples: int, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._state, self._samples, self._events = state, samples, events
        self._started = False
        self._last = monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generator until it ends, fails, or the client leaves or stops reading."""
        self._scope, self._send = scope, send
        finished = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_left, receive, tasks.cancel_scope)
            tasks.start_soon(self._beat, tasks.cancel_scope)
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
        except SlowClientError:
            return False
        except Exception as error:
            await self._fail(error, receive)
        return True

    async def _write(self, block: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._last = monotonic()
        with anyio.move_on_after(self._state.settings.write_timeout) as scope:
            await self._send({"type": "http.response.body", "body": block, "more_body": True})
        if scope.cancelled_caught:
            raise SlowClientError

    async def _fail(self, error: Exception, receive: Receive) -> None:
        """Tell an error: as a response of its own, or as the last event of a stream that has begun."""
        self._state.failed(self._scope, error)
        if not self._started:
            await error_response(error)(self._scope, receive, self._send)
            return
        body = event(error_body(error)) + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _beat(self, tasks: anyio.CancelScope) -> None:
        """Comments in long silences, so that proxies keep the connection."""
        interval = self._state.settings.heartbeat
        while True:
            await anyio.sleep(max(0.0, self._last + interval - monotonic()))
            if monotonic() - self._last < interval:
                continue
            try:
                await self._write(b": waiting\n\n")
            except SlowClientError:
                tasks.cancel()


class SlowClientError(Exception):
    """The client did not read its stream within the time allowed."""


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
