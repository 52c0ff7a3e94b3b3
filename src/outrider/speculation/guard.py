"""A drafter behind glass: whatever it does costs speed, never output.

Every call is guarded. Raising, too many or too deep drafts, ids outside the vocabulary and calls that take far longer
than the verification they feed are contained, told once in the log, and after repeated failures end in the drafter
being switched off. `forget` is always passed on, so that nothing is held for ended sequences.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from outrider.drafters.base import Context, Drafter, Need, Observation
from outrider.errors import DrafterError
from outrider.speculation.prices import NO_CALLS, Calls
from outrider.speculation.report import DrafterReport
from outrider.speculation.trial import Trial, depth, head
from outrider.types import NO_DRAFT, Draft

Clock = Callable[[], float]  # seconds; the simulator brings its own
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardRules:
    """When a drafter is warned about and when it is switched off."""

    max_failures: int = 5  # failures in a row before it is switched off
    slow_ratio: float = 10.0  # a call this many times longer than a verification counts as slow
    slow_floor_s: float = 0.005  # but never a call shorter than this
    max_slow: int = 8  # slow calls in a row before it is switched off
    silent_rounds: int = 128  # rounds after which a drafter that helps nobody is warned about
    silent_rate: float = 0.02  # agreed tokens per round below which it helps nobody


DEFAULT_RULES = GuardRules()


@dataclass
class Tally:
    """Running counts of one drafter; the names are those of DrafterReport."""

    rounds: int = 0
    proposals: int = 0
    agreed_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    votes_won: int = 0
    positions: list[int] = field(default_factory=list)

    def win(self, trial: Trial) -> None:
        """Count a draft that the target verified under this drafter's name."""
        accepted = len(trial.verdict.accepted)
        self.drafts += 1
        self.draft_tokens += trial.verdict.drafted
        self.accepted_tokens += accepted
        self.votes_won += sum(1 for draft in trial.proposals.values() if draft.tokens) > 1
        self.positions += [0] * (accepted - len(self.positions))
        for position in range(accepted):
            self.positions[position] += 1


class GuardedDrafter:
    """Wraps one drafter: calls it safely, checks what it returns and keeps its tally."""

    def __init__(
        self, drafter: Drafter, vocab_size: int, rules: GuardRules = DEFAULT_RULES, clock: Clock = perf_counter
    ) -> None:
        self.name = drafter.name
        self.needs: frozenset[Need] = drafter.needs
        self.off: str | None = None
        self.time_s = 0.0
        self._calls = NO_CALLS
        self._recall: int | None = getattr(drafter, "recall", None)
        self._shown: dict[int, int] = {}  # sequence -> tokens it has read or drafted itself
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._rules = rules
        self._clock = clock
        self._verify_s = 0.0
        self._in_a_row: Counter[str] = Counter()
        self._slow_in_a_row = 0
        self._warned_silent = False
        self.failures = 0
        self._tally = Tally()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        """One valid draft per context: never deeper than asked, never an id outside the vocabulary."""
        drafts = [NO_DRAFT] * len(contexts)
        asked = [i for i, deep in enumerate(depths) if deep > 0]
        if self.off or not asked:
            return drafts
        started, failures = self._clock(), self.failures
        try:
            given = self._drafter.propose([contexts[i] for i in asked], [depths[i] for i in asked])
            self._check_count(given, len(asked))
            for i, draft in zip(asked, given, strict=True):
                drafts[i] = self._valid(draft, depths[i])
        except Exception as error:
            self._fail("propose", error)
        if self.failures == failures:
            self._in_a_row["propose"] = 0
        seconds = self._clock() - started
        self._tally_call([contexts[i] for i in asked], [drafts[i] for i in asked], seconds)
        self._watch_time(seconds)
        return drafts

    def unread(self, context: Context) -> int:
        """Tokens of a sequence that this drafter was not shown yet and would read before it drafts."""
        missing = max(0, len(context.tokens) - self._shown.get(context.sequence_id, 0))
        return missing if self._recall is None else min(missing, self._recall)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Pass the news on."""
        if self.off:
            return
        started = self._clock()
        try:
            self._drafter.observe(observations)
            self._in_a_row["observe"] = 0
        except Exception as error:
            self._fail("observe", error)
        self.time_s += self._clock() - started

    def forget(self, sequence_id: int) -> None:
        """Passed on even when switched off."""
        self._shown.pop(sequence_id, None)
        try:
            self._drafter.forget(sequence_id)
        except Exception as error:
            self._fail("forget", error)

    def learn(self, trial: Trial) -> None:
        """Keep the record of a round in which this drafter was asked."""
        tally = self._tally
        tally.rounds += 1
        tally.proposals += bool(trial.proposals[self.name].tokens)
        tally.agreed_tokens += trial.agreed[self.name]
        if trial.submitted.tokens and trial.submitted.drafter == self.name:
            tally.win(trial)
        self._warn_if_silent()

    def drain(self) -> Calls:
        """What it did since this was last asked."""
        calls, self._calls = self._calls, NO_CALLS
        return calls

    def verified(self, seconds: float) -> None:
        """What a verification costs at the moment, the measure of slowness."""
        self._verify_s = seconds if not self._verify_s else 0.9 * self._verify_s + 0.1 * seconds

    def report(self, weight: float) -> DrafterReport:
        return DrafterReport(
            name=self.name,
            per_position=tuple(self._tally.positions),
            weight=weight,
            time_s=self.time_s,
            failures=self.failures,
            off=self.off,
            held=len(getattr(self._drafter, "held", ())),
            **{key: value for key, value in vars(self._tally).items() if key != "positions"},
        )

    def _tally_call(self, contexts: Sequence[Context], drafts: Sequence[Draft], seconds: float) -> None:
        """Keep what a call did: its passes, its tokens and what of its sequences was new to the drafter."""
        passes, tokens, unread = 1, 0, 0
        for context, draft in zip(contexts, drafts, strict=True):
            passes, tokens = max(passes, depth(draft)), tokens + max(1, len(draft))
            unread += self.unread(context)
            self._shown[context.sequence_id] = len(context.tokens) + len(draft)
        self._calls = self._calls.plus(passes, tokens, seconds, unread, len(drafts))

    def _check_count(self, drafts: Sequence[Draft], wanted: int) -> None:
        if len(drafts) != wanted:
            raise DrafterError(f"returned {len(drafts)} drafts for {wanted} sequences")

    def _valid(self, draft: Draft, deepest: int) -> Draft:
        """The draft as it may be used; raises for what no correct drafter returns."""
        if not draft.tokens:
            return NO_DRAFT
        if min(draft.tokens) < 0 or max(draft.tokens) >= self._vocab_size:
            raise DrafterError(f"proposed an id outside the vocabulary of {self._vocab_size}")
        if draft.parents is not None and not _well_formed(draft.parents, len(draft)):
            raise DrafterError("proposed a tree whose parents do not come before their children")
        if draft.confidence is not None and not _are_probabilities(draft.confidence, len(draft)):
            raise DrafterError("stated confidences that are not one probability per token")
        if draft.probs is not None and len(draft.probs) != len(draft):
            raise DrafterError(f"gave {len(draft.probs)} rows of q for {len(draft)} tokens")
        if depth(draft) > deepest:
            self._fail(
                "propose", DrafterError(f"proposed {depth(draft)} tokens where at most {deepest} were asked for")
            )
            draft = head(draft, deepest)
        return draft if draft.drafter == self.name else replace(draft, drafter=self.name)

    def _fail(self, call: str, error: Exception) -> None:
        """Contain a failure: told once, counted, and in the end the drafter is switched off."""
        self._in_a_row[call] += 1
        self.failures += 1
        if self.failures == 1:
            log.warning("drafter %r failed in %s and is skipped: %s: %s", self.name, call, type(error).__name__, error)
        if self._in_a_row[call] >= self._rules.max_failures:
            self._switch_off(f"{call} failed {self._in_a_row[call]} times in a row, the last time with: {error}")

    def _watch_time(self, seconds: float) -> None:
        self.time_s += seconds
        limit = max(self._rules.slow_floor_s, self._rules.slow_ratio * self._verify_s)
        self._slow_in_a_row = self._slow_in_a_row + 1 if self._verify_s and seconds > limit else 0
        if self._slow_in_a_row >= self._rules.max_slow:
            self._switch_off(f"a call takes {seconds * 1e3:.1f} ms, a verification {self._verify_s * 1e3:.1f} ms")

    def _switch_off(self, reason: str) -> None:
        if not self.off:
            log.warning("drafter %r is switched off: %s", self.name, reason)
            self.off = reason

    def _warn_if_silent(self) -> None:
        """A drafter that is on but never right must not stay unnoticed."""
        tally, rules = self._tally, self._rules
        if self._warned_silent or tally.rounds < rules.silent_rounds:
            return
        if tally.agreed_tokens < rules.silent_rate * tally.rounds:
            log.warning(
                "drafter %r guessed %d tokens right in %d rounds: it does not speed anything up",
                self.name,
                tally.agreed_tokens,
                tally.rounds,
            )
            self._warned_silent = True


def _well_formed(parents: Sequence[int], count: int) -> bool:
    return len(parents) == count and all(-1 <= parent < node for node, parent in enumerate(parents))


def _are_probabilities(values: Sequence[float], count: int) -> bool:
    return len(values) == count and all(0.0 <= value <= 1.0 for value in values)
