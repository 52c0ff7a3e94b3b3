"""The pools of the pipelined system, and when drafting pauses (SC '25, section on the asynchronous pipeline).

    pending -> running -> (drafting) -> drafted -> (verifying) -> running | gone

Every request is in exactly one place. The pools know nothing of threads, tokens or models; whoever owns them (the
pipelined engine, the simulator) locks around them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from math import ceil
from typing import Generic, Protocol, TypeVar

D = TypeVar("D")


class Place(Enum):
    """Where a request is."""

    PENDING = "pending"
    RUNNING = "running"
    DRAFTING = "drafting"
    DRAFTED = "drafted"
    VERIFYING = "verifying"


class Pools(Generic[D]):
    """Three pools and the two hands between them. `capacity`: requests in flight at most (they hold KV)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: dict[int, Place] = {}
        self._pending: deque[int] = deque()
        self._running: deque[int] = deque()
        self._drafted: deque[int] = deque()
        self._drafts: dict[int, D] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def level(self) -> int:
        """Requests whose drafts wait for the target."""
        return len(self._drafted)

    @property
    def ready(self) -> int:
        """Requests that could be drafted for now."""
        return len(self._running)

    def place(self, request: int) -> Place | None:
        """Where a request is; None: it is gone."""
        return self._places.get(request)

    def add(self, requests: Iterable[int]) -> None:
        """Queue new requests; as many as fit start running."""
        for request in requests:
            self._places[request] = Place.PENDING
            self._pending.append(request)
        self._start()

    def claim(self, most: int) -> list[int]:
        """Take running requests to draft for, those waiting longest first."""
        return self._take(self._running, most, Place.DRAFTING)

    def deliver(self, request: int, draft: D) -> None:
        """A draft is finished; one of a request that is gone is dropped."""
        if self._places.get(request) is Place.DRAFTING:
            self._places[request] = Place.DRAFTED
            self._drafts[request] = draft
            self._drafted.append(request)

    def withdraw(self, most: int) -> list[tuple[int, D]]:
        """Take drafts to verify, oldest first."""
        return [(request, self._drafts.pop(request)) for request in self._take(self._drafted, most, Place.VERIFYING)]

    def resume(self, request: int) -> None:
        """A verified request goes on; one that is gone stays gone."""
        if self._places.get(request) is Place.VERIFYING:
            self._places[request] = Place.RUNNING
            self._running.append(request)

    def remove(self, request: int) -> None:
        """The request ended or was aborted, wherever it is; another may start."""
        place = self._places.pop(request, None)
        queues = {Place.PENDING: self._pending, Place.RUNNING: self._running, Place.DRAFTED: self._drafted}
        if place in queues:
            queues[place].remove(request)
        self._drafts.pop(request, None)
        self._start()

    def _start(self) -> None:
        while self._pending and len(self._places) - len(self._pending) < self._capacity:
            request = self._pending.popleft()
            self._places[request] = Place.RUNNING
            self._running.append(request)

    def _take(self, queue: deque[int], most: int, place: Place) -> list[int]:
        taken = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._places.update(dict.fromkeys(taken, place))
        return taken


class FlowControl(Protocol):
    """When the drafters pause, so that unverified drafts (and their KV) stay few."""

    def target(self, batch: int) -> int:
        """Pool level from which on drafting pauses; `batch` is what the target verifies at once."""
        ...

    def observe(self, draft_s: float, verify_s: float) -> None:
        """How long a batch took to draft and to verify."""
        ...


class PublishedFlow:
    """Pause at a pool of one verification batch, resume below it."""

    def target(self, batch: int) -> int:
        return batch

    def observe(self, draft_s: float, verify_s: float) -> None:
        """Nothing to learn."""


class LittleFlow:
    """The pool that Little's law asks for: L = throughput x time that a draft takes to be made.

    The target consumes batch / verify_s requests per second; what it consumes while a batch of drafts is being made
    must be in the pool already: batch x draft_s / verify_s, with slack for variation, and one batch at least. The
    published rule is the case of drafting that takes no longer than verifying; where it takes longer (several drafters
    at work in parallel), a single batch would leave the target waiting.
    """

    def __init__(self, slack: float = 0.25, memory: float = 0.9) -> None:
        self._slack = slack
        self._memory = memory
        self._draft_s = 0.0
        self._verify_s = 0.0

    def target(self, batch: int) -> int:
        if self._verify_s <= 0:
            return batch
        return max(batch, ceil(batch * (1 + self._slack) * self._draft_s / self._verify_s))

    def observe(self, draft_s: float, verify_s: float) -> None:
        if self._verify_s == 0:
            self._draft_s, self._verify_s = draft_s, verify_s
        self._draft_s += (1 - self._memory) * (draft_s - self._draft_s)
        self._verify_s += (1 - self._memory) * (verify_s - self._verify_s)


FLOWS: dict[str, type[PublishedFlow] | type[LittleFlow]] = {"published": PublishedFlow, "little": LittleFlow}
