"""The loop: plan, draft, prepare, forward, judge, commit, observe, apply. No tensors, no feature flags.

Plain decoding is this same loop with NoSpeculator. The engine is not thread-safe: one thread steps it (api/).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from outrider.config import EngineConfig
from outrider.drafters.base import Context, Observation
from outrider.engine.scheduler import Scheduler
from outrider.errors import CapacityError, OutriderError
from outrider.memory.kv import KVMemory
from outrider.models.spec import Decoder
from outrider.runner.runner import Forward, Runner
from outrider.sequence import Plan, Sequence, Work
from outrider.speculation.none import NoSpeculator
from outrider.speculation.speculator import Speculator
from outrider.speculation.timing import StepTiming, Stopwatch
from outrider.types import Delta, Draft, Finish, Float32, Reads, Traffic, Verdict
from outrider.verify.judge import judge
from outrider.verify.logprobs import logprob

log = logging.getLogger(__name__)
MOST_LOSSES = 2  # times that a sequence computes lost KV again


class Engine:
    """Runs many requests on one decoder, a step at a time."""

    def __init__(
        self, decoder: Decoder, memory: KVMemory, speculator: Speculator | NoSpeculator, config: EngineConfig
    ) -> None:
        self.memory = memory
        self.speculator = speculator
        self.scheduler = Scheduler(memory, config, speculator.max_depth)
        self.runner = Runner(decoder, memory.cache)
        self.steps = 0

    def add(self, sequences: SequenceOf[Sequence]) -> None:
        """Queue the samples of a request."""
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> list[Delta]:
        """One turn of the loop; the news of every sequence that gained tokens or ended."""
        watch = Stopwatch()
        plan = self._plan()
        if not plan:
            return self._refuse()
        watch.ended("overhead")
        drafts = self._draft(plan)
        watch.ended("draft")
        try:
            view = self.memory.prepare(plan, drafts)
        except CapacityError as error:
            return [self._end(plan.works[-1].sequence, Finish("error", str(error)))]
        watch.ended("overhead")
        forward = self.runner.forward(plan, drafts, view)
        watch.ended("verify")
        lost = self.memory.finish()
        verdicts = [
            Verdict() if work.sequence.id in lost else self._judge(index, work, drafts[index], forward)
            for index, work in enumerate(plan.works)
        ]
        starts = [work.sequence.computed for work in plan.works]
        self.memory.commit(plan, drafts, verdicts, forward)
        watch.ended("overhead")
        rows = sum(work.rows + len(draft) for work, draft in zip(plan.works, drafts, strict=True))
        self._observe(plan, drafts, verdicts, starts, forward, watch.timing(len(plan.works), rows), lost)
        self.steps += 1
        return self._apply(plan, verdicts) + self._redo(plan, lost)

    def abort(self, request_id: str) -> list[Delta]:
        """End a request's samples at once, in whatever phase they are, and release all they hold."""
        return [self._end(sequence, Finish("abort")) for sequence in self.scheduler.find(request_id)]

    def check(self) -> None:
        """Prove that memory is whole; when idle, that nothing is held."""
        self.memory.check()
        assert self.scheduler.busy or self.memory.pool.held == 0, "pages are held while idle"

    def close(self) -> None:
        """Nothing runs beside this engine."""

    def _plan(self) -> Plan:
        """Who runs in this step; drafters forget whom the plan has sent back to the queue."""
        plan = self.scheduler.plan()
        self._forget(self.scheduler.preempted)
        return plan

    def _draft(self, plan: Plan) -> list[Draft]:
        """Drafts for the works that have a budget, empty ones for the others."""
        drafts = [Draft()] * len(plan.works)
        indices = [index for index, work in enumerate(plan.works) if work.limit > 0]
        if indices:
            contexts = [context(plan.works[index].sequence) for index in indices]
            proposed = self.speculator.draft(contexts, [plan.works[index].limit for index in indices])
            for index, draft in zip(indices, proposed, strict=True):
                drafts[index] = draft
        return drafts

    def _judge(self, index: int, work: Work, draft: Draft, forward: Forward) -> Verdict:
        """What the target says of one sequence's step. A request that cannot be sampled ends alone."""
        sequence = work.sequence
        try:
            if sequence.wants_prompt_logprobs:
                score_prompt(work, forward.prompt_logits(index))
            if not work.samples:
                return Verdict()
            return judge(draft, forward.rows(index), sequence.sampler, sequence.stopper, sequence.output)
        except OutriderError as error:
            return Verdict(finish=Finish("error", str(error)))
        except Exception as error:
            log.exception("request %s failed while it was sampled", sequence.request.id)
            return Verdict(finish=Finish("error", f"{type(error).__name__}: {error}"))

    def _observe(
        self,
        plan: Plan,
        drafts: list[Draft],
        verdicts: list[Verdict],
        starts: list[int],
        forward: Forward,
        timing: StepTiming,
        lost: frozenset[int],
    ) -> None:
        """Tell the speculator which tokens became final and what the step cost."""
        observations = []
        for index, (work, draft, verdict) in enumerate(zip(plan.works, drafts, verdicts, strict=True)):
            if work.sequence.id in lost:
                continue
            start = starts[index]
            accepted = [draft.tokens[node] for node in verdict.accepted]
            tokens = (*work.sequence.tokens[start : start + work.rows], *accepted)
            features = forward.features(index, verdict.accepted)
            observations.append(Observation(work.sequence.id, start, tokens, verdict, features))
        self._tell(observations, timing)

    def _tell(self, observations: SequenceOf[Observation], timing: StepTiming) -> None:
        self.speculator.observe(observations, timing)

    def _apply(self, plan: Plan, verdicts: list[Verdict]) -> list[Delta]:
        """Append what was decided and end what is finished: exactly one final delta per sample."""
        deltas = []
        for work, verdict in zip(plan.works, verdicts, strict=True):
            sequence = work.sequence
            first = len(sequence.tokens) == sequence.prompt_length
            sequence.tokens.extend(verdict.tokens)
            reads = self.memory.reading.reads(sequence)
            traffic = self.memory.place.tell(sequence.id) if verdict.tokens else None
            if verdict.finish is not None:
                deltas.append(self._end(sequence, verdict.finish, verdict, first, reads, traffic))
            elif verdict.tokens:
                deltas.append(delta(sequence, verdict, None, first, reads, traffic))
        return deltas

    def _redo(self, plan: Plan, lost: frozenset[int]) -> list[Delta]:
        """Sequences whose KV was lost compute it again; one that loses it again and again ends with an error."""
        deltas = []
        for sequence in [work.sequence for work in plan.works if work.sequence.id in lost]:
            if sequence.losses < MOST_LOSSES:
                log.warning("KV of request %s was lost; it is computed again", sequence.request.id)
                self.scheduler.redo(sequence)
                self._forget([sequence])
            else:
                deltas.append(self._end(sequence, Finish("error", self.memory.place.excuse())))
        return deltas

    def _refuse(self) -> list[Delta]:
        """Nobody can go on: where nobody runs either, the first in the queue does not fit at all."""
        if self.scheduler.running or not self.scheduler.waiting:
            return []
        text = "the request needs more KV memory than there is; shorten it or raise kv_memory"
        return [self._end(self.scheduler.waiting[0], Finish("error", text))]

    def _end(
        self,
        sequence: Sequence,
        finish: Finish,
        verdict: Verdict | None = None,
        first: bool = False,
        reads: Reads | None = None,
        traffic: Traffic | None = None,
    ) -> Delta:
        self.scheduler.finish(sequence)
        self._forget([sequence])
        return delta(sequence, verdict or Verdict(), finish, first, reads, traffic)

    def _forget(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self.speculator.forget(sequence.id)


def context(sequence: Sequence) -> Context:
    """A sequence as drafters see it."""
    return Context(sequence.id, sequence.tokens, sequence.prompt_length, sequence.sampler)


def delta(
    sequence: Sequence,
    verdict: Verdict,
    finish: Finish | None,
    first: bool,
    reads: Reads | None = None,
    traffic: Traffic | None = None,
) -> Delta:
    """The news of one sample after a step."""
    return Delta(
        request_id=sequence.request.id,
        index=sequence.index,
        tokens=verdict.tokens,
        logprobs=verdict.logprobs,
        accepted=len(verdict.accepted),
        drafted=verdict.drafted,
        drafter=verdict.drafter,
        finish=finish,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if first and sequence.prompt_logprobs else None,
        cached_tokens=sequence.cached_tokens,
        reads=reads,
        traffic=traffic,
    )


def score_prompt(work: Work, logits: Float32) -> None:
    """Append the log-probabilities of the prompt tokens that follow the computed rows; the first token has none."""
    sequence = work.sequence
    if sequence.computed == 0:
        sequence.prompt_logprobs[:] = [None]
    for row in range(work.rows):
        following = sequence.computed + row + 1
        if following < sequence.prompt_length and following == len(sequence.prompt_logprobs):
            token, top, vocabulary = (
                sequence.tokens[following],
                sequence.params.prompt_logprobs,
                sequence.sampler.vocab_size,
            )
            sequence.prompt_logprobs.append(logprob(logits[row], token, top or 0, vocabulary))
