"""Draft lengths chosen per request from measured costs: the most tokens per second, 0 included.

After SmartSpec/TurboSpec (goodput-chosen length, arXiv 2406.14066), per request as in AdaSpec and FASER: the drafted
tokens of all requests are ranked by their probability of being reached and accepted, and the batch takes as many of
them as raise (tokens gained) / (seconds of the step). That is also the early stop inside a draft: a token of low
confidence, and all behind it, is not verified.

Drafters that cost next to nothing are asked as deep as allowed and trimmed afterwards. For the others the depth is
chosen beforehand (costly.py). What rows and drafts cost is learnt from every step (worth.py). Rows that may turn out to
be wasted are paid for from an account (account.py), and a batch that verifies nothing is probed now and then, more and
more seldom. The first token of every proposal is scored by plain steps too, so requests recover without probes of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.speculation.acceptance import Estimates, survival
from outrider.speculation.account import Account
from outrider.speculation.costly import CostlyDrafters
from outrider.speculation.costs import CostTable, RunningMean
from outrider.speculation.goodput_rules import GoodputRules
from outrider.speculation.length import Unread, nothing_unread
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.probe import Probe, Rest
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, head, subset
from outrider.speculation.worth import Worth
from outrider.types import Draft

_PATIENT = 0.02  # weight of a sequence's latest round in what drafting gains: gains come in bursts


class GoodputLength:
    """Per-request lengths that maximise predicted tokens per second."""

    def __init__(
        self,
        low: int,
        high: int,
        estimates: Estimates,
        costs: CostTable,
        draft_costs: DraftCosts,
        rules: GoodputRules | None = None,
        parallel: bool = False,
    ) -> None:
        """`parallel`: the drafters run side by side, each on a device of its own."""
        self.max_depth = high
        self._low = low
        self._rules = rules or GoodputRules()
        self._worth = Worth(costs, draft_costs, high, self._rules.cheap, parallel)
        self._costly = CostlyDrafters(estimates, self._worth, high, self._rules)
        self._on = True
        self._probe: Probe | None = None  # while nothing is verified
        self._account = Account(self._rules.allowance, self._rules.credit)  # of verifying what anybody drafted
        self._rest = Rest(self._rules.patience, self._rules.longest_rest)
        self._net = RunningMean(0.0)  # plain steps that a round of drafting gained, waiting for drafts paid

    def awake(self) -> bool:
        self._costly.begin()
        return self._low > 0 or not self._rest.resting()

    def depths(
        self,
        name: str,
        ids: Sequence[int],
        limits: Sequence[int],
        standing: Sequence[Mapping[str, Draft]],
        unread: Unread = nothing_unread,
    ) -> list[int]:
        most = [min(limit, self.max_depth) for limit in limits]
        if self._worth.is_cheap(name, len(ids)) or not any(most):
            return most
        return self._costly.depths(name, ids, most, standing, unread, self._low)

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        self._costly.begin()
        kept = [subset(draft, nodes) for draft, nodes in zip(drafts, self._keep(drafts), strict=True)]
        if any(kept):
            self._probe = None
            self._judge(len(ids))
        elif any(drafts):
            self._rest.count()
            self._probe_verification(drafts, kept)
        return kept

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        self._settle(trials, timing, self._worth.learn(trials, timing, calls))
        self._costly.lives.count(trials)

    def forget(self, sequence_id: int) -> None:
        self._costly.lives.end(sequence_id)

    def _judge(self, n: int) -> None:
        """A round of drafting is of use where rounds like it have paid for themselves lately, deciding included.

        In company they must have paid a little more: learning from them takes its time too, for every sequence.
        """
        if self._net.value >= self._rules.crowding(n):
            self._rest.end()
        else:
            self._rest.count()

    def _probe_verification(self, drafts: Sequence[Draft], kept: list[Draft]) -> None:
        """Now and then a beginning is verified although it does not seem to pay."""
        self._probe = self._probe or Probe(self._rules.first_probe)
        if self._probe.due(self._rules.last_probe):
            longest = max(range(len(drafts)), key=lambda i: len(drafts[i]))
            kept[longest] = head(drafts[longest], self._rules.probe_depth)

    def _settle(self, trials: Sequence[Trial], timing: StepTiming, costly: Mapping[str, float]) -> None:
        """Book what costly drafting took (seconds), what verifying drafts took, and what accepted tokens saved."""
        one, n = self._worth.one, len(trials)
        income = self._rules.share * timing.total_s / one
        self._costly.account.book(income - self._worth.together(list(costly.values())) / one)
        self._account.book(income)
        drafted = [trial for trial in trials if trial.verdict.drafted]
        net = -timing.draft_s / one
        if drafted:
            token, row = self._worth.plain_s(n) / n / one, self._worth.slope(n) / one
            for trial in drafted:
                gained = len(trial.verdict.accepted) * token - trial.verdict.drafted * row
                net += gained
                self._account.book(gained)
                if trial.submitted.drafter in costly:
                    self._costly.account.book(gained)
        if drafted or timing.draft_s > 0:
            self._net.learn(net, min(0.1, _PATIENT * n))

    def _keep(self, drafts: Sequence[Draft]) -> list[list[int]]:
        """Which nodes of every draft are worth verifying, all requests weighed together."""
        if len(drafts) == 1 and drafts[0].is_chain:  # ranked already: a later token is never likelier
            count = self._best_count(_survival(drafts[0]), 1)
            return [list(range(max(count, min(self._low, len(drafts[0])))))]
        ranked = sorted(
            ((p, i, node) for i, draft in enumerate(drafts) for node, p in enumerate(_survival(draft))),
            key=lambda entry: (-entry[0], entry[2]),
        )
        count = self._best_count([p for p, _, _ in ranked], len(drafts))
        keep = [set(range(min(self._low, len(draft)))) for draft in drafts]
        for _, i, node in ranked[:count]:
            keep[i].add(node)
        return [sorted(nodes) for nodes in keep]

    def _best_count(self, probabilities: Sequence[float], n: int) -> int:
        """How many of the ranked tokens give the most tokens per second; 0 unless the gain beats the margin."""
        if not probabilities:
            return 0
        plain_s, *steps_s = self._worth.steps_s(n, len(probabilities))
        plain = highest = n / plain_s
        best, tokens = 0, float(n)
        for count, (p, seconds) in enumerate(zip(probabilities, steps_s, strict=True), start=1):
            tokens += p
            goodput = tokens / seconds
            if goodput > highest:
                best, highest = count, goodput
        self._on = highest > plain * (1 + self._rules.margin(self._on, n))
        return min(best, self._affordable_rows(n)) if self._on else 0

    def _affordable_rows(self, n: int) -> int:
        """Rows that may be tried, were none of them accepted."""
        return int(self._account.balance * self._worth.one / max(self._worth.slope(n), 1e-12))


def _survival(draft: Draft) -> list[float]:
    """Survival of a draft; one of unknown confidence is taken as a fair coin per token."""
    if draft.confidence is not None:
        return survival(draft)
    return [0.5 ** len(draft.path(node)) for node in range(len(draft))]
