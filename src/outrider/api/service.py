"""The engine on a thread of its own, for asyncio servers: submit, stream, cancel, drain.

Every accepted request gets exactly one final piece per sample, whatever happens to the engine. Requests and
cancellations cross to the engine thread through one queue; pieces come back through the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from outrider.api.core import Core, Options
from outrider.api.mailbox import Mailbox, Pieces
from outrider.api.outputs import Piece
from outrider.api.text import TextStream
from outrider.errors import CapacityError, RequestError
from outrider.memory.report import TierReport
from outrider.models.load import LoadedModel
from outrider.sequence import Sequence as Sample
from outrider.sequence import Status
from outrider.types import Delta, Finish, Request, SamplingParams

log = logging.getLogger(__name__)
Sink = Callable[[Piece], object]


@dataclass
class Ticket:
    """One accepted request on its way through the engine thread."""

    request: Request
    samples: list[Sample]
    streams: list[TextStream]
    sink: Sink
    open_samples: int


def tier_stats(report: TierReport | None) -> dict[str, dict[str, float]]:
    """What the slow tier did, for metrics; empty where there is none."""
    if report is None:
        return {}
    names = {"loaded_bytes": report.loaded_bytes, "stored_bytes": report.stored_bytes}
    times = {"exposed_wait_seconds": report.exposed_s, "busy_seconds": report.busy_s}
    return {"disk": {**names, **times, "slow_layers": report.slow_layers}}


class Service:
    """A model that serves many asynchronous callers."""

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        speculative_config: Mapping[str, Any] | str | None = "auto",
        context_config: Mapping[str, Any] | None = None,
        max_waiting: int = 1024,
        pace: float = 0.0,
        **options: Any,
    ) -> None:
        """pace: seconds for which pieces may gather on their way to an event loop."""
        self._core = Core(model, Options.parse(speculative_config, context_config, options))
        self.model_name = self._core.loaded.name
        self.max_model_len = self._core.resolved.max_model_len
        self.tokenizer = self._core.tokenizer
        self._max_waiting, self._pace = max_waiting, pace
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._lock = threading.Lock()  # guards `_open`, `_failure` and `_mailboxes`
        self._open: set[str] = set()  # ids of requests that are accepted and have not ended
        self._failure: str | None = None
        self._last: Finish | None = None  # how open requests end once the engine has stopped
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Piece]:
        """Pieces of all samples of one request. Closing the iterator, or cancelling its task, aborts at once.

        Raises RequestError, UnsupportedError, PromptTooLongError or CapacityError before the first piece.
        """
        pieces = Pieces()
        sink = partial(self._mailbox().post, pieces)

        if params.structured_outputs is None:
            ticket = self._accept(prompt, params, request_id, sink)
        else:  # a grammar may take seconds to compile, which the other callers' pieces should not wait for
            accepting = asyncio.ensure_future(asyncio.to_thread(self._accept, prompt, params, request_id, sink))
            try:
                ticket = await asyncio.shield(accepting)
            except asyncio.CancelledError:
                accepting.add_done_callback(self._cancel_accepted)
                raise
        open_samples = params.n
        try:
            while open_samples:
                piece = await pieces.get()
                open_samples -= piece.finish is not None
                yield piece
        finally:
            if open_samples:
                self._inbox.put(lambda: self._cancel(ticket))

    def _cancel_accepted(self, accepting: asyncio.Future[Ticket]) -> None:
        """Whoever asked left before the request was accepted: it ends as soon as it has been."""
        if not accepting.cancelled() and accepting.exception() is None:
            ticket = accepting.result()
            self._inbox.put(lambda: self._cancel(ticket))

    def stats(self) -> dict[str, Any]:
        """A snapshot for metrics: counts, pages, prefix cache, speculation."""
        core = self._core
        scheduler, memory = core.engine.scheduler, core.memory
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            "steps": core.engine.steps,
            "kv_pages_used": memory.pool.held,
            "kv_pages_total": memory.pool.num_pages,
            "kv_bytes_touched": memory.pool.touched * (core.resolved.kv_bytes // memory.pool.num_pages),
            "kv_bytes_total": core.resolved.kv_bytes,
            "prefix_cache_queries": memory.prefix_queries,
            "prefix_cache_hits": memory.prefix_hits,
            "speculation": asdict(core.speculator.report()),
            "context": asdict(memory.report()),
            "memory": core.place.describe(),
            "tiers": tier_stats(memory.place.report()),
        }

    def describe(self) -> dict[str, Any]:
        """The resolved configuration and the memory plan."""
        return self._core.describe()

    @property
    def healthy(self) -> bool:
        """Whether the engine thread runs."""
        return self._failure is None and self._thread.is_alive()

    @property
    def pending(self) -> int:
        """Requests that are accepted and have not ended."""
        return len(self._open)

    def check(self) -> None:
        """Prove, between two steps, that memory is whole (for tests and soak runs)."""
        done, errors = threading.Event(), []

        def prove() -> None:
            try:
                self._core.engine.check()
            except AssertionError as error:
                errors.append(error)
            done.set()

        self._inbox.put(prove)
        if not done.wait(60):
            raise RequestError("the engine did not answer within 60 s")
        if errors:
            raise errors[0]

    def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine thread; what has not ended within `drain_s` seconds is aborted."""
        deadline = monotonic() + drain_s
        while self._open and monotonic() < deadline:
            threading.Event().wait(0.01)
        self._inbox.put(None)
        self._thread.join()
        self._core.close()

    def _mailbox(self) -> Mailbox:
        """The running loop's; those of closed loops go."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._mailboxes:
                still = {other: box for other, box in self._mailboxes.items() if not other.is_closed()}
                self._mailboxes = {**still, loop: Mailbox(loop, self._pace)}
            return self._mailboxes[loop]

    def _accept(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None, sink: Sink) -> Ticket:
        """Check a request on the caller's side and hand it to the engine thread."""
        request = self._reserve(prompt, params, request_id)
        try:
            samples = self._core.samples(request)
            streams = [self._core.text_stream(params) for _ in range(params.n)]
        except BaseException:
            self._release(request.id)
            raise
        ticket = Ticket(request, samples, streams, sink, params.n)
        self._tickets[request.id] = ticket
        self._inbox.put(lambda: self._core.engine.add(ticket.samples))
        if self._last is not None:  # the engine stopped meanwhile and may not have seen this ticket
            self._end(request.id, self._last)
        return ticket

    def _reserve(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None) -> Request:
        """Take a place in the queue; refusals come before anything is made."""
        with self._lock:
            if not self.healthy:
                raise CapacityError(f"the engine has stopped: {self._failure or 'it was closed'}; restart the server")
            if len(self._open) >= self._max_waiting:
                raise CapacityError(f"{len(self._open)} requests are waiting; try again later")
            request = self._core.request(prompt, params, request_id)
            if request.id in self._open:
                raise RequestError(f"request id {request.id!r} is in use; choose another", request.id, "request_id")
            self._open.add(request.id)
            return request

    def _release(self, request_id: str) -> None:
        """Give the place in the queue back."""
        with self._lock:
            self._open.discard(request_id)

    def _cancel(self, ticket: Ticket) -> None:
        """End a request whose caller has left (engine thread)."""
        if ticket.request.id in self._tickets:
            self._deliver(self._core.engine.abort(ticket.request.id))

    def _run(self) -> None:
        """The engine thread: take what came in, make a step, tell the news; sleep when there is nothing to do."""
        try:
            while self._take_messages():
                if self._core.engine.scheduler.busy:
                    self._deliver(self._core.engine.step())
        except BaseException as error:
            log.exception("the engine thread failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_all()

    def _take_messages(self) -> bool:
        """Handle what is in the queue, waiting for it while idle; False when the service closes."""
        wait = not self._core.engine.scheduler.busy
        while True:
            try:
                message = self._inbox.get(block=wait)
            except Empty:
                return True
            if message is None:
                return False
            message()
            wait = False

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            ticket = self._tickets.get(delta.request_id)
            if ticket is not None:
                self._tell(ticket, ticket.streams[delta.index].push(delta))

    def _tell(self, ticket: Ticket, piece: Piece) -> None:
        """Hand a piece to the caller; one whose event loop is gone hears nothing and harms nobody."""
        if piece.finish is not None:
            ticket.open_samples -= 1
            if ticket.open_samples == 0:
                self._tickets.pop(ticket.request.id, None)
                self._release(ticket.request.id)
        try:
            ticket.sink(piece)
        except RuntimeError:
            log.debug("request %s: the caller's event loop is closed", ticket.request.id)

    def _end_all(self) -> None:
        """The engine stops: everybody still waiting gets a final piece."""
        self._last = Finish("error", self._failure) if self._failure else Finish("abort")
        with self._lock:
            self._failure = self._failure or "it was closed"
        for request_id in list(self._tickets):
            self._end(request_id, self._last)

    def _end(self, request_id: str, finish: Finish) -> None:
        """The last pieces of a request that the engine will not serve any more; whoever takes the ticket tells them."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            ended = {sample.index for sample in ticket.samples if sample.status is Status.FINISHED}
            for index in sorted(set(range(ticket.request.params.n)) - ended):
                self._tell(ticket, Piece(request_id, index, "", finish=finish))
