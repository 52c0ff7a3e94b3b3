"""Who may come in: samples in flight, requests a minute, and the drain before the end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import anyio

from outrider.server.errors import HttpError

MAX_CLIENTS = 10_000  # buckets kept; the least recently seen goes first


class Gate:
    """Counts what is in flight and bounds how long it may take; `drain` closes the gate before the server ends."""

    def __init__(self, max_queue: int, request_timeout: float) -> None:
        self._max_queue = max_queue
        self._timeout = request_timeout
        self._scopes: set[anyio.CancelScope] = set()
        self.in_flight = 0
        self.draining = False

    @contextmanager
    def admit(self, samples: int) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises HttpError: 429 when full, 503 when draining, 504 when the request's time is over.
        """
        self._check(samples)
        scope = anyio.CancelScope(deadline=asyncio.get_running_loop().time() + self._timeout)
        self.in_flight += samples
        self._scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            self.in_flight -= samples
            self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise self._over()

    def drain(self, seconds: float) -> None:
        """Let nobody in any more; whoever is inside has `seconds` to finish. Called on the event loop."""
        self.draining = True
        end = asyncio.get_running_loop().time() + seconds
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, end)

    def _check(self, samples: int) -> None:
        if self.draining:
            raise HttpError(503, "shutting_down", "the server is shutting down; ask another one", retry_after=5)
        if self.in_flight + samples > self._max_queue:
            message = f"{self.in_flight} samples are in flight, the limit is {self._max_queue}; try again later"
            raise HttpError(429, "queue_full", message, retry_after=1)

    def _over(self) -> HttpError:
        if self.draining:
            return HttpError(503, "shutting_down", "the server shut down before this was finished", retry_after=5)
        return HttpError(504, "timeout", f"not finished within {self._timeout:g} s; ask for fewer tokens")


@dataclass
class Bucket:
    """Requests that one client may still make at a moment."""

    left: float
    at: float


class RateLimit:
    """A token bucket per client: bursts of up to a minute's worth, then `per_minute` evenly. None lets all pass."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = monotonic) -> None:
        self._rate = (per_minute or 0) / 60
        self._burst = max(1.0, per_minute or 0)
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, client: str) -> None:
        """Count one request; raises HttpError 429 that says how long to wait."""
        if not self._rate:
            return
        now = self._clock()
        bucket = self._buckets.pop(client, None) or Bucket(self._burst, now)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._rate)
        bucket.at = now
        self._buckets[client] = bucket
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if bucket.left < 1:
            wait = (1 - bucket.left) / self._rate
            raise HttpError(429, "rate_limit_exceeded", f"too many requests; wait {wait:.0f} s", retry_after=wait)
        bucket.left -= 1
