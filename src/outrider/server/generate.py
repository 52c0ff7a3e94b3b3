"""One request on its way through the engine: its prompts side by side, their pieces as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import OutriderError
from outrider.server.backend import Backend, Piece
from outrider.server.errors import HttpError
from outrider.server.usage import Meter
from outrider.types import SamplingParams


@dataclass(frozen=True)
class Job:
    """What is asked of the engine: every prompt is answered `params.n` times."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    @property
    def samples(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.params.n


class News(NamedTuple):
    """A piece and which choice of the response it belongs to."""

    prompt: int
    choice: int
    piece: Piece


async def generate(backend: Backend, job: Job, meter: Meter) -> AsyncGenerator[News, None]:
    """All pieces of a job as they come. Closing it aborts everything.

    Raises what the engine refuses; HttpError or OutriderError when the engine ends a sample with an error.
    """
    try:
        async with aclosing(_answers(backend, job, 0) if len(job.prompts) == 1 else _merged(backend, job)) as stream:
            async for news in stream:
                _check(news.piece)
                meter.add(*news)
                yield news
    finally:
        meter.finish()


def _check(piece: Piece) -> None:
    """A sample that the engine gave up is an error for its whole request."""
    if piece.finish is None or piece.finish.reason in ("stop", "length"):
        return
    if piece.finish.reason == "abort":
        raise HttpError(503, "aborted", "the request was aborted by the server", retry_after=5)
    raise OutriderError(f"the engine gave up: {piece.finish.detail or 'unknown reason'}")


async def _merged(backend: Backend, job: Job) -> AsyncGenerator[News, None]:
    """The answers to several prompts as they come."""
    queue: asyncio.Queue[News | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(backend, job, number, queue)) for number in range(len(job.prompts))]
    try:
        open_prompts = len(tasks)
        while open_prompts:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_prompts -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _pump(backend: Backend, job: Job, number: int, queue: asyncio.Queue[News | Exception | None]) -> None:
    try:
        async with aclosing(_answers(backend, job, number)) as stream:
            async for news in stream:
                queue.put_nowait(news)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def _answers(backend: Backend, job: Job, number: int) -> AsyncGenerator[News, None]:
    stream = backend.stream(job.prompts[number], job.params, f"{job.id}-{number}")
    async with aclosing(stream):
        async for piece in stream:
            yield News(number, number * job.params.n + piece.index, piece)
