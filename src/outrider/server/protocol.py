"""One HTTP/1.1 connection: its headers must come in time, and a chunk costs little to write."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADERS = 64 << 10  # bytes of a request's line and headers


class Connection(h11.Connection):
    """Frames the data of a chunked answer itself: h11 checks every chunk for as long as all else about a token takes.

    Data changes nothing in h11's state, so that it need not hear of it; everything else goes its way.
    """

    _chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """The bytes to write for an event."""
        if self._chunked and type(event) is h11.Data and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        written = super().send(event)
        if type(event) is h11.Response and written is not None:
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in written.lower()  # a line of its own, no value
        return written


class BoundedProtocol(H11Protocol):
    """A uvicorn protocol that closes connections whose request headers do not arrive in time (slow-loris)."""

    header_timeout = 30.0
    stall_timeout = 90.0  # seconds an answer may lie unread before its connection is cut
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = Connection(h11.SERVER, MAX_HEADERS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request's headers must arrive in time."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes came: while they do not make a request, time runs."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._header_timer is None:
            self._watch()

    def on_response_complete(self) -> None:
        """Between requests the keep-alive timeout applies."""
        self._unwatch()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read. Closing would wait for it for ever, so in the end the connection is cut."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        self._end_stall()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self._unwatch()
        self._end_stall()
        super().connection_lost(exc)

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout, self._give_up)

    def _unwatch(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
