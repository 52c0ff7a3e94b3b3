"""A thread that moves KV blocks while the model computes, and the account of what that cost.

Contract: jobs that touch a common block run in the order they were submitted; other jobs may finish in any order, so
whoever reads what a job writes waits on that job's ticket. A job that fails keeps its error for its own waiters and
the thread goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from outrider.errors import TransferError
from outrider.memory.tiers.base import Blocks

Kind = Literal["load", "store"]
Watcher = Callable[[Kind, int, float, float], object]  # what, its first block, from when to when


class Ticket:
    """The promise of one job."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the job has ended, well or not; never waits."""
        return self._done.is_set()

    def settle(self, error: BaseException | None = None) -> None:
        """The job ended, well or not."""
        self._error = error
        self._done.set()

    def join(self) -> None:
        """Return when the job has ended; raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


@dataclass
class Account:
    """What moved, and how much of it was in the way. Seconds and bytes since the start."""

    loads: int = 0
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    busy_seconds: float = 0.0  # jobs running
    exposed_seconds: float = 0.0  # somebody waiting for them
    failures: int = 0


class Mover(Protocol):
    """Where jobs are submitted."""

    account: Account

    def submit(self, kind: Kind, blocks: Blocks, job: Callable[[], int]) -> Ticket:
        """Queue a job that touches `blocks` and returns the bytes it moved. Waits while the queue is full."""
        ...

    def submit_all(self, kind: Kind, jobs: Sequence[tuple[Blocks, Callable[[], int]]]) -> list[Ticket]:
        """Queue (blocks, job) pairs in order and at once, so that none runs while the others are being submitted."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Return when the job has ended, counting the time as exposed; raise what it raised."""
        ...

    def drain(self) -> None:
        """Return when nothing is queued or running."""
        ...

    def close(self) -> None:
        """Finish what is queued and stop. Closing twice is fine."""
        ...


class Transfer:
    """One thread, first in, first out: write-backs and loads share the order in which they were asked for."""

    def __init__(self, depth: int = 256) -> None:
        self.account = Account()
        self.watcher: Watcher | None = None  # told of every job that ended
        self._depth = depth
        self._queue: deque[tuple[Kind, Blocks, Callable[[], int], Ticket]] = deque()
        self._change = threading.Condition()
        self._running = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outrider-transfer", daemon=True)
        self._thread.start()

    def submit(self, kind: Kind, blocks: Blocks, job: Callable[[], int]) -> Ticket:
        return self.submit_all(kind, [(blocks, job)])[0]

    def submit_all(self, kind: Kind, jobs: Sequence[tuple[Blocks, Callable[[], int]]]) -> list[Ticket]:
        tickets = [Ticket() for _ in jobs]
        with self._change:
            if len(self._queue) >= self._depth:
                self._wait_for_room()
            if self._closed:
                raise TransferError("the transfer thread is closed; no KV can move any more")
            self._queue.extend((kind, *job, ticket) for job, ticket in zip(jobs, tickets, strict=True))
            self._change.notify_all()
        return tickets

    def wait(self, ticket: Ticket) -> None:
        if ticket.done:
            return ticket.join()
        start = time.perf_counter()
        try:
            ticket.join()
        finally:
            self.account.exposed_seconds += time.perf_counter() - start

    def drain(self) -> None:
        with self._change:
            while self._queue or self._running:
                self._change.wait()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def _wait_for_room(self) -> None:
        """A full queue stops whoever submits: that time is exposed too. Called with the lock held."""
        start = time.perf_counter()
        while len(self._queue) >= self._depth and not self._closed:
            self._change.wait()
        self.account.exposed_seconds += time.perf_counter() - start

    def _pick(self) -> int:
        """Index of the queued job to run next; called with the lock held."""
        return 0

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._queue and not self._closed:
                    self._change.wait()
                if not self._queue:
                    return
                index = self._pick()
                kind, blocks, job, ticket = self._queue[index]
                del self._queue[index]
                self._running = True
                self._change.notify_all()
            self._perform(kind, blocks, job, ticket)
            with self._change:
                self._running = False
                self._change.notify_all()

    def _perform(self, kind: Kind, blocks: Blocks, job: Callable[[], int], ticket: Ticket) -> None:
        start = time.perf_counter()
        error: BaseException | None = None
        moved = 0
        try:
            moved = job()
        except BaseException as caught:
            error = caught
        self._book(kind, moved, time.perf_counter() - start, error is not None)
        if self.watcher is not None and len(blocks):
            self.watcher(kind, int(blocks[0]), start, time.perf_counter())
        ticket.settle(error)

    def _book(self, kind: Kind, moved: int, seconds: float, failed: bool) -> None:
        account = self.account
        account.busy_seconds += seconds
        account.failures += failed
        if kind == "load":
            account.loads += 1
            account.loaded_bytes += moved
        else:
            account.stores += 1
            account.stored_bytes += moved
