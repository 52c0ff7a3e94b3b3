"""Pieces on their way from the engine's thread to an event loop: one wake-up for all that a step has to say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from outrider.api.outputs import Piece


def join(first: Piece, second: Piece) -> Piece | None:
    """Two pieces of a sample as one; None where that would lose who drafted what, or what a step loaded."""
    told = second.accepted or second.drafted or second.prompt_logprobs is not None or second.traffic is not None
    if first.index != second.index or told:
        return None
    return replace(
        first,
        text=first.text + second.text,
        texts=first.texts + second.texts,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
        reads=second.reads,
    )


class Pieces:
    """One request's pieces on its event loop, for one reader: a queue of nothing but what this takes."""

    def __init__(self) -> None:
        self.begun: set[int] = set()  # samples of which something was posted
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
    """One event loop's letters. Any thread posts; the loop is woken once and then takes all that is there.

    pace: seconds for which letters may gather after a delivery. Where a step takes a few milliseconds and shares its
    cores with the loop and with whoever reads, waking both for every token is dearer than telling it (docs/server.md).
    The first and the last piece of a sample never wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: float = 0.0) -> None:
        self._loop, self._pace = loop, pace
        self._letters: deque[tuple[Pieces, Piece]] = deque()
        self._called = False  # the loop has been woken and will empty the box
        self._gathering = False  # a timer of the loop will

    def post(self, receiver: Pieces, piece: Piece) -> None:
        """Hand over one piece. RuntimeError where the loop is closed."""
        self._letters.append((receiver, piece))
        urgent = piece.finish is not None or piece.index not in receiver.begun
        receiver.begun.add(piece.index)
        waits = self._gathering and not urgent and not self._loop.is_closed()
        if waits or self._called:
            return
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
        told = bool(self._letters)
        for receiver, piece in self._take():
            receiver.put_nowait(piece)
        if told and self._pace and not self._gathering:
            self._gathering = True
            self._loop.call_later(self._pace, self._gathered)

    def _take(self) -> Iterator[tuple[Pieces, Piece]]:
        """All letters, joined with those that came just before them for the same reader where the box is paced."""
        waiting: dict[int, tuple[Pieces, Piece]] = {}
        while self._letters:
            receiver, piece = self._letters.popleft()
            before = waiting.pop(id(receiver), None)
            joined = join(before[1], piece) if before is not None and self._pace else None
            if before is not None and joined is None:
                yield before
            waiting[id(receiver)] = receiver, joined or piece
        yield from waiting.values()

    def _gathered(self) -> None:
        """The time is over. The flag falls first, as above."""
        self._gathering = False
        self._empty()
