"""The same loop with drafting beside it: small models draft for some requests while the target verifies others.

The twin of engine.py, after the asynchronous pipeline of SC '25: verified sequences wait in the running pool, a thread
claims them and drafts, finished drafts wait in the pool of intermediate results, and every step verifies what is there.
Flow control decides when drafting pauses. Only planning and the calls of the speculator differ from the plain loop, so
the tokens cannot: what a step verifies is still a draft behind the last known token, judged by the same function.

One request alone is served as in the plain loop, without a word to the other thread: there is nothing to overlap with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter

from outrider.config import EngineConfig
from outrider.drafters.base import Observation
from outrider.engine.engine import Engine, context
from outrider.memory.kv import KVMemory
from outrider.models.spec import Decoder
from outrider.sequence import Plan, Sequence
from outrider.speculation.none import NoSpeculator
from outrider.speculation.pools import FlowControl, Place, Pools
from outrider.speculation.speculator import Speculator
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import head
from outrider.types import NO_DRAFT, Draft

log = logging.getLogger(__name__)


class PipelinedEngine(Engine):
    """Overlaps drafting with verification. Its speculator lives on one thread; the others send it messages in order."""

    def __init__(
        self,
        decoder: Decoder,
        memory: KVMemory,
        speculator: Speculator | NoSpeculator,
        config: EngineConfig,
        flow: FlowControl,
    ) -> None:
        super().__init__(decoder, memory, speculator, config)
        self.pools: Pools[Draft] = Pools(config.max_num_seqs)
        self.alone = True  # one request at most: everything happens inline
        self.overlapped = 0  # drafts that were made while the target verified something else
        self._flow = flow
        self._there: dict[int, Draft] = {}  # drafts that this step verifies
        self._sequences: dict[int, Sequence] = {}  # of the sequences in the pools
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafts")
        self._sent: list[Future[None]] = []  # messages to the speculator that may not be done
        self._made: SimpleQueue[tuple[int, Draft]] = SimpleQueue()  # finished drafts on their way into the pool
        self._draft_s = 0.0  # of the latest batch of drafts

    def check(self) -> None:
        """As in the plain loop, once the speculator has heard everything."""
        self._quiesce()
        super().check()

    def close(self) -> None:
        """Stop the drafting thread."""
        self._worker.shutdown(wait=True)

    def _plan(self) -> Plan:
        """Plan those whose drafts are there, and have the others drafted for while the target verifies."""
        self._enter()
        self.alone = len(self.scheduler.running) + len(self.scheduler.waiting) <= 1
        while True:
            if self.alone:
                self._quiesce()
            self._receive()
            held = set() if self.alone else self._undrafted()
            plan = self.scheduler.plan(held)
            self._forget(self.scheduler.preempted)
            if plan or not held:
                self._there = dict(self.pools.withdraw(len(self._sequences)))
                self.overlapped += 0 if self.alone else self._dispatch()
                return plan
            self._dispatch()
            self._quiesce()  # nobody is ready: the target has to wait for drafts

    def _enter(self) -> None:
        """Put sequences that decode and may be drafted for into the running pool."""
        for sequence in self.scheduler.running:
            if sequence.id not in self._sequences and self._wants_draft(sequence):
                self._sequences[sequence.id] = sequence
                self.pools.add([sequence.id])

    def _receive(self) -> None:
        """Put finished drafts into the pool."""
        while not self._made.empty():
            self.pools.deliver(*self._made.get())

    def _undrafted(self) -> set[int]:
        """Who sits this step out: sequences that may be drafted for and have no draft yet."""
        return {i for i in self._sequences if self.pools.place(i) in (Place.RUNNING, Place.DRAFTING)}

    def _dispatch(self) -> int:
        """Have a batch drafted for, if none is being drafted and flow control lets it; its size."""
        batch = max(1, len(self._sequences) // 2)
        drafting = any(self.pools.place(i) is Place.DRAFTING for i in self._sequences)
        if drafting or self.pools.level >= self._flow.target(batch):
            return 0
        claimed = [self._sequences[i] for i in self.pools.claim(batch) if self._ready(i)]
        if claimed:
            self._send(lambda: self._make(claimed))
        return len(claimed)

    def _ready(self, sequence_id: int) -> bool:
        """Whether a claimed sequence is worth drafting for now; one near its end goes on undrafted."""
        if self._wants_draft(self._sequences[sequence_id]):
            return True
        self.pools.deliver(sequence_id, NO_DRAFT)
        return False

    def _wants_draft(self, sequence: Sequence) -> bool:
        return self.scheduler.draft_limit(sequence, self.scheduler.max_draft) > 0

    def _make(self, sequences: SequenceOf[Sequence]) -> None:
        """Draft for some sequences (on the drafting thread, which touches nothing else of this engine)."""
        started = perf_counter()
        limits = [self.scheduler.draft_limit(sequence, self.scheduler.max_draft) for sequence in sequences]
        try:
            drafts = self.speculator.draft([context(sequence) for sequence in sequences], limits)
        except Exception:
            log.exception("drafting failed; its requests go on without")
            drafts = [NO_DRAFT] * len(sequences)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self._made.put((sequence.id, draft))
        self._draft_s = perf_counter() - started

    def _draft(self, plan: Plan) -> list[Draft]:
        """The drafts that are there; whoever is in the plan without one was not held, and is drafted for inline."""
        drafts: list[Draft] = []
        for work in plan.works:
            draft = self._there.pop(work.sequence.id, None)
            if draft is None and work.limit > 0:
                self._quiesce()
                draft = self.speculator.draft([context(work.sequence)], [work.limit])[0]
            drafts.append(head(draft or NO_DRAFT, work.limit))
        for sequence_id in self._there:  # no rows or pages were left for them in this step
            self.pools.resume(sequence_id)
        return drafts

    def _tell(self, observations: SequenceOf[Observation], timing: StepTiming) -> None:
        """Queue the news for the speculator; the sequences go back to the running pool."""
        self._flow.observe(self._draft_s, timing.verify_s)
        told = replace(timing, pool=self.pools.level)
        self._send(lambda: self.speculator.observe(observations, told))
        for seen in observations:
            self.pools.resume(seen.sequence_id)

    def _forget(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence.id, None)
            self.pools.remove(sequence.id)
            self._send(lambda i=sequence.id: self.speculator.forget(i))  # type: ignore[misc]

    def _send(self, message: Callable[[], None]) -> None:
        """A message to the speculator, in order: on its own thread, or here where nothing else happens meanwhile."""
        if self.alone:
            self._quiesce()
            message()
            return
        self._sent = [future for future in self._sent if not future.done() or future.exception()]
        self._sent.append(self._worker.submit(message))

    def _quiesce(self) -> None:
        """Wait until the speculator has handled everything; what went wrong there is raised here."""
        sent, self._sent = self._sent, []
        wait(sent)
        for future in sent:
            future.result()
