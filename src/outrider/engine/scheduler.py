"""Who runs in a step and how far: continuous batching, chunked prefill, admission and preemption by recomputation.

No phases: a sequence has computed and known tokens, and a plan raises `computed`. Prefill chunks, prefix hits,
decoding and verification are the same operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from outrider.config import EngineConfig
from outrider.memory.kv import KVMemory
from outrider.sequence import Plan, Sequence, Status, Work


@dataclass
class Budget:
    """What is left for one plan: rows of the forward pass and pages of the pool."""

    rows: int
    pages: int
    works: list[Work] = field(default_factory=list)

    def spend(self, work: Work, pages: int) -> None:
        """Put a work into the plan."""
        self.works.append(work)
        self.rows -= work.rows + work.limit
        self.pages -= pages


class Scheduler:
    """First come, first served; running sequences before waiting ones; the latest one yields when pages run out."""

    def __init__(self, memory: KVMemory, config: EngineConfig, max_draft: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.preempted: list[Sequence] = []  # since the last `plan` began; drafters forget them
        self.max_draft = max_draft  # tokens
        self._memory, self._config = memory, config

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind the others."""
        self.waiting.append(sequence)

    def plan(self, held: Container[int] = ()) -> Plan:
        """The next step. Running sequences keep their turn; waiting ones are admitted while nothing was preempted.

        held: ids of sequences that sit this step out (the pipeline is drafting for them).
        """
        self.preempted = []
        budget = Budget(self._config.max_num_batched_tokens, self._memory.room())
        turns = [sequence for sequence in self.running if sequence.id not in held]
        others = len(turns) + min(len(self.waiting), self._config.max_num_seqs - len(self.running))
        for turn, sequence in enumerate(turns, start=1):
            if budget.rows > 0 and sequence.status is Status.RUNNING:
                self._continue(sequence, budget, others - turn)
        if not self.preempted:
            self._admit(budget)
        return Plan(tuple(budget.works))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and release what it holds."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._memory.release(sequence)

    def redo(self, sequence: Sequence) -> None:
        """KV of a running sequence was lost: send it back to the head of the queue, to compute all of it again."""
        self.running.remove(sequence)
        self._memory.redo(sequence)
        sequence.status = Status.WAITING
        sequence.losses += 1
        self.waiting.appendleft(sequence)

    def find(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return [s for s in self._all() if s.request.id == request_id]

    def _continue(self, sequence: Sequence, budget: Budget, behind: int) -> None:
        """Plan a running sequence, making room by dropping drafts first and later sequences second.

        behind: sequences whose turn is still to come; drafts leave a row for each of them.
        """
        rows = min(self._memory.due(sequence), budget.rows)
        limit = self.draft_limit(sequence, budget.rows - rows - behind)
        if self._memory.missing(sequence, rows + limit) > budget.pages:
            limit = 0
        while self._memory.missing(sequence, rows) > budget.pages:
            victim = self.running[-1]
            if not self._drop_drafts(budget):
                self._preempt(victim, budget)
            if victim is sequence and sequence.status is not Status.RUNNING:
                return
        budget.spend(Work(sequence, rows, limit), self._memory.missing(sequence, rows + limit))

    def _admit(self, budget: Budget) -> None:
        """Start waiting sequences while rows, pages and places last."""
        while self.waiting and budget.rows > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if self._sibling_in_prefill(sequence):
                return
            before = self._memory.pool.available
            self._memory.adopt(sequence)
            budget.pages -= before - self._memory.room()  # adopted pages stay, and the newcomer's buffers take room
            if self._memory.missing(sequence, sequence.remaining) > budget.pages:
                self._memory.suspend(sequence)
                return
            before = self._memory.pool.available
            self._memory.restore(sequence)
            budget.pages -= before - self._memory.pool.available
            rows = min(self._memory.due(sequence), budget.rows)
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            budget.spend(Work(sequence, rows), self._memory.missing(sequence, rows))

    def _sibling_in_prefill(self, sequence: Sequence) -> bool:
        """Whether another sample of the same request is still computing the prompt that both share."""
        return any(
            s.request is sequence.request and s.computed < s.prompt_length and not s.wants_prompt_logprobs
            for s in self.running
        )

    def draft_limit(self, sequence: Sequence, rows: int) -> int:
        """Most tokens worth drafting: only while decoding, within the request's and the model's lengths."""
        if sequence.remaining != 1 or not sequence.params.speculative:
            return 0
        wanted = sequence.params.max_tokens
        left = self.max_draft if wanted is None else wanted - (len(sequence.tokens) - sequence.prompt_length) - 1
        room = (self._config.max_model_len or self._memory.capacity) - len(sequence.tokens)
        return max(0, min(self.max_draft, left, room, rows))

    def _drop_drafts(self, budget: Budget) -> bool:
        """Take the draft budgets of the plan back; drafts must never cost another sequence its place."""
        if not any(work.limit for work in budget.works):
            return False
        works, budget.works = budget.works, []
        for work in works:
            budget.rows += work.rows + work.limit
            budget.pages += self._memory.missing(work.sequence, work.rows + work.limit)
            budget.spend(Work(work.sequence, work.rows), self._memory.missing(work.sequence, work.rows))
        return True

    def _preempt(self, sequence: Sequence, budget: Budget) -> None:
        """Send a sequence back to the head of the queue; it recomputes its known tokens when its turn comes."""
        before = self._memory.pool.available
        self.running.remove(sequence)
        self._memory.suspend(sequence)
        budget.pages += self._memory.pool.available - before
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.preempted.append(sequence)
        self.waiting.appendleft(sequence)

    def _all(self) -> Iterable[Sequence]:
        return [*self.running, *self.waiting]
