"""The collective and adaptive part: asks drafters, merges their drafts, chooses how far to go, learns from verdicts.

    draft:   whom to ask (vote) and how deep (length) -> propose -> merge (vote) -> trim (length)
    observe: every proposal is scored by what the target turned out to say -> drafters, vote and length learn

It decides; drafters guess; `judge` accepts. It never touches tensors and cannot change the output. One thread calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from outrider.drafters.base import Context, Need, Observation
from outrider.speculation.acceptance import Estimates, NoEstimates
from outrider.speculation.guard import Clock, GuardedDrafter
from outrider.speculation.history import History
from outrider.speculation.length import LengthPolicy
from outrider.speculation.report import SpeculationReport
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, head
from outrider.speculation.vote import VotePolicy
from outrider.types import NO_DRAFT, Draft

#: What was proposed and submitted for a sequence, until the target has spoken.
_Open = tuple[dict[str, Draft], Draft]


class Speculator:
    """Several drafters, one vote, one length policy."""

    def __init__(
        self,
        drafters: Sequence[GuardedDrafter],
        vote: VotePolicy,
        length: LengthPolicy,
        estimates: Estimates | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        self.needs: frozenset[Need] = frozenset[Need]().union(*(drafter.needs for drafter in drafters))
        self.max_depth = length.max_depth
        self._drafters = drafters
        self._named = {drafter.name: drafter for drafter in drafters}
        self._vote = vote
        self._length = length
        self._estimates = estimates or NoEstimates()
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._lengths: Counter[int] = Counter()
        self._times = [0.0, 0.0, 0.0]  # draft, verify, overhead
        self._control_s = 0.0
        self._steps = 0
        self._history = History()

    def draft(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft]:
        """One draft per context with at most limits[i] tokens; limit 0 means that the request wants none."""
        drafts = [NO_DRAFT] * len(contexts)
        wanted = [i for i, limit in enumerate(limits) if limit > 0]
        if not wanted or not self._length.awake():
            return drafts
        started, spent = self._clock(), self._drafting_s()
        chosen = self._draft([contexts[i] for i in wanted], [limits[i] for i in wanted])
        for i, draft in zip(wanted, chosen, strict=True):
            drafts[i] = draft
        self._control_s += self._clock() - started - (self._drafting_s() - spent)
        return drafts

    def observe(self, observations: Sequence[Observation], timing: StepTiming) -> None:
        """Learn from a step. Sequences that were not drafted for are observations too."""
        started, spent = self._clock(), self._drafting_s()
        for drafter in self._drafters:
            drafter.observe(observations)
            drafter.verified(timing.verify_s)
        trials = [self._close(seen) for seen in observations if seen.verdict.tokens]
        for trial in trials:
            for name in trial.proposals:
                self._named[name].learn(trial)
        self._estimates.learn(trials)
        self._vote.observe(trials)
        self._length.observe(trials, timing, {drafter.name: drafter.drain() for drafter in self._drafters})
        self._count(timing)
        self._remember(trials, timing)
        self._control_s += self._clock() - started - (self._drafting_s() - spent)

    def forget(self, sequence_id: int) -> None:
        """The sequence ended, was aborted or preempted: nothing is held for it afterwards. Never fails."""
        self._open.pop(sequence_id, None)
        for drafter in self._drafters:
            drafter.forget(sequence_id)
        self._vote.forget(sequence_id)
        self._estimates.forget(sequence_id)
        self._length.forget(sequence_id)

    def report(self) -> SpeculationReport:
        """The record so far."""
        weights = self._vote.weights()
        draft_s, verify_s, overhead_s = self._times
        return SpeculationReport(
            drafters=tuple(drafter.report(weights[drafter.name]) for drafter in self._drafters),
            steps=self._steps,
            draft_s=draft_s,
            verify_s=verify_s,
            overhead_s=overhead_s,
            control_s=self._control_s,
            lengths=dict(sorted(self._lengths.items())),
            history=self._history.moments(),
        )

    def _draft(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft]:
        ids = [context.sequence_id for context in contexts]
        proposals: list[dict[str, Draft]] = [{} for _ in contexts]
        believed: list[dict[str, Draft]] = [{} for _ in contexts]  # the same with calibrated confidences
        ideas = False
        for drafter in self._drafters:
            name, depths = drafter.name, self._depths(drafter, contexts, ids, limits, believed)
            for i, draft in enumerate(drafter.propose(contexts, depths)):
                if draft.tokens:
                    ideas = True
                    proposals[i][name] = draft
                    believed[i][name] = self._estimates.calibrated(ids[i], name, draft)
                elif depths[i] > 0:
                    proposals[i][name] = NO_DRAFT
        chosen = self._chosen(ids, believed, limits) if ideas else [NO_DRAFT] * len(ids)
        self._open.update(zip(ids, zip(proposals, chosen, strict=True), strict=True))
        self._lengths.update(map(len, chosen))
        return chosen

    def _chosen(self, ids: Sequence[int], believed: list[dict[str, Draft]], limits: Sequence[int]) -> list[Draft]:
        """What is handed out of the proposals: one draft each by vote, as far as it is worth verifying."""
        merged = [self._vote.merge(i, drafts) for i, drafts in zip(ids, believed, strict=True)]
        fitting = [head(draft, limit) for draft, limit in zip(merged, limits, strict=True)]
        return self._length.trim(ids, fitting, limits)

    def _depths(
        self,
        drafter: GuardedDrafter,
        contexts: Sequence[Context],
        ids: Sequence[int],
        limits: Sequence[int],
        standing: list[dict[str, Draft]],
    ) -> list[int]:
        """How deep a drafter is to draft for every sequence: what the length wants, as far as the vote lets it."""
        if drafter.off:
            return [0] * len(ids)
        reaches = [self._vote.reach(i, drafter.name, bool(others)) for i, others in zip(ids, standing, strict=True)]
        unread = lambda name, i: self._named[name].unread(contexts[i])  # noqa: E731
        wanted = self._length.depths(drafter.name, ids, limits, standing, unread)
        return list(map(min, wanted, reaches))

    def _close(self, seen: Observation) -> Trial:
        """The round of one sequence, now that the target has spoken; what was not verified counts as not submitted."""
        proposals, submitted = self._open.pop(seen.sequence_id, ({}, NO_DRAFT))
        return Trial(seen.sequence_id, proposals, head(submitted, seen.verdict.drafted), seen.verdict)

    def _remember(self, trials: Sequence[Trial], timing: StepTiming) -> None:
        """Add the step to the record of how things went."""
        drafted = accepted = 0
        for trial in trials:
            drafted += trial.verdict.drafted
            accepted += len(trial.verdict.accepted)
        if self._history.add(len(trials), drafted, accepted, timing):
            self._history.note(self._steps, dict(self._vote.weights()))

    def _drafting_s(self) -> float:
        return sum(drafter.time_s for drafter in self._drafters)

    def _count(self, timing: StepTiming) -> None:
        self._steps += 1
        self._times[0] += timing.draft_s
        self._times[1] += timing.verify_s
        self._times[2] += timing.overhead_s
