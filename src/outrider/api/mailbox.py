"""Pieces on their way from the engine's thread to an event loop: one wake-up for all that a step has to say."""

from __future__ import annotations

import asyncio
from collections import deque

from outrider.api.outputs import Piece


class Pieces:
    """One request's pieces on its event loop, for one reader: a queue of nothing but what this takes."""

    def __init__(self) -> None:
        self._ready: deque[Piece] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put_nowait(self, piece: Piece) -> None:
        """Add a piece and wake the reader."""
        self._ready.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Piece:
        """The next piece, as soon as there is one."""
        while not self._ready:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._ready.popleft()


class Mailbox:
    """One event loop's letters. Any thread posts; the loop is woken once and then takes all that is there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Pieces, Piece]] = deque()
        self._called = False

    def post(self, receiver: Pieces, piece: Piece) -> None:
        """Hand over one piece. RuntimeError where the loop is closed."""
        self._letters.append((receiver, piece))
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                self._called = False
                self._letters.clear()
                raise

    def _empty(self) -> None:
        """Runs on the loop. The flag falls first: what is posted from now on is taken here or calls again."""
        self._called = False
        while self._letters:
            receiver, piece = self._letters.popleft()
            receiver.put_nowait(piece)
