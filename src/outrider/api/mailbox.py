"""Pieces on their way from the engine's thread to an event loop: one wake-up for all that a step has to say."""

from __future__ import annotations

import asyncio
from collections import deque

from outrider.api.outputs import Piece

Pieces = asyncio.Queue[Piece]


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
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        """Runs on the loop. The flag falls first: what is posted from now on is taken here or calls again."""
        self._called = False
        while self._letters:
            receiver, piece = self._letters.popleft()
            receiver.put_nowait(piece)
