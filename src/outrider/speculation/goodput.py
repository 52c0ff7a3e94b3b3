"""Draft lengths chosen per request from measured costs: the most tokens per second, 0 included.

After SmartSpec/TurboSpec (goodput-chosen length, arXiv 2406.14066), per request as in AdaSpec and FASER: the drafted
tokens of all requests are ranked by their probability of being reached and accepted, and the batch takes as many of
them as raise (tokens gained) / (seconds of the step). That is also the early stop inside a draft: a token of low
confidence, and all behind it, is not verified.

Drafters that cost next to nothing are asked as deep as allowed and trimmed afterwards. For the others the depth is
chosen beforehand: what they are expected to add to the drafts that stand already, against their own cost, what they
must read first included. All of that is paid for from an account (account.py), so that trying a drafter costs little
whatever it is like. One that rests, and a batch that verifies nothing, are probed now and then, more and more seldom.
The first token of every proposal is scored by plain steps too, so requests recover without probes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from outrider.errors import ConfigError
from outrider.speculation.acceptance import Estimates, survival
from outrider.speculation.account import Account
from outrider.speculation.costs import CostTable, RunningMean
from outrider.speculation.depths import LonePrice, Market, plan_alone, plan_depths
from outrider.speculation.length import Unread, nothing_unread
from outrider.speculation.pace import Lives, Throughput
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.probe import Probe, Rest
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, head, subset
from outrider.types import Draft


@dataclass(frozen=True)
class GoodputRules:
    """Settings of the goodput length."""

    cheap: float = 0.03  # a drafter whose longest drafts, of all sequences, cost less of a plain step is always asked
    margin_on: float = 0.01  # predicted gain that keeps speculation on
    margin_off: float = 0.04  # predicted gain that switches it on again (hysteresis)
    margin_crowd: float = 0.01  # what both grow by with every further sequence: where rows cost, errors eat the gain
    first_probe: int = 16  # idle rounds before the first probe
    last_probe: int = 128  # probes never come more seldom than this
    probe_depth: int = 2  # tokens of a probe
    crowd: int | None = None  # sequences above which costly drafters are not asked at all; None: wherever they pay
    allowance: float = 1.5  # plain steps of time that trying may cost at first: costly drafters, and verifying drafts
    share: float = 0.005  # share of decoding time that each of both may cost from then on
    credit: float = 16.0  # plain steps of time that each may save up by what it gains
    patience: int = 8  # rounds in a row whose drafts are not worth verifying before nobody drafts for a while
    longest_rest: int = 16  # rounds of such a while at most; each is twice as long as the one before

    def __post_init__(self) -> None:
        if not 0 <= self.margin_on <= self.margin_off or min(self.cheap, self.margin_crowd) < 0:
            raise ConfigError(
                "goodput: use 0 <= margin_on <= margin_off, and margin_crowd and cheap from 0", "length_options"
            )
        if not 1 <= self.first_probe <= self.last_probe or self.probe_depth < 1:
            raise ConfigError("goodput: use 1 <= first_probe <= last_probe and probe_depth from 1", "length_options")
        if not 0 <= self.allowance <= self.credit or not 0 <= self.share <= 1:
            raise ConfigError("goodput: use 0 <= allowance <= credit and share in [0, 1]", "length_options")
        if self.crowd is not None and self.crowd < 1:
            raise ConfigError(f"goodput: crowd = {self.crowd} is refused; use 1 or more", "length_options")
        if self.patience < 1 or self.longest_rest < 0:
            raise ConfigError("goodput: use patience from 1 and longest_rest from 0", "length_options")


_HIDDEN = 0.9  # drafting below this share of a verification is hidden by a pipeline
_VERIFICATION = "verification"  # probed when the whole batch verifies nothing
_REVIEW = 16  # steps after which it is looked up anew which drafters are cheap
_PATIENT = 0.02  # weight of a sequence's latest round in what drafting gains: gains come in bursts
_LIFE = 128.0  # tokens a sequence is expected to gain, before any has ended
_ROUND = 2.0  # tokens a sequence gains per round, where what it costs to begin with it is spread over its life


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
        self._estimates = estimates
        self._costs = costs
        self._draft_costs = draft_costs
        self._plan: Mapping[str, list[int]] | None = None  # depths of the costly drafters in this round
        self._exposed = RunningMean(1.0)  # share of a drafting step that the target waits for
        self._serial = 0.0 if parallel else 1.0
        self._on = True
        self._overhead_s = RunningMean(0.0)  # seconds of a step, running means: scheduling and sampling
        self._waited_s = RunningMean(0.0)  # waiting for drafts
        self._rate = Throughput()
        self._spare_rows = 0  # rows of the last step that belonged to nobody who drafts
        self._probes: dict[str, Probe] = {}  # of idle drafters, and of the batch when nothing is verified
        self._account = Account(self._rules.allowance, self._rules.credit)  # of the costly drafters
        self._rows_account = Account(self._rules.allowance, self._rules.credit)  # of verifying what anybody drafted
        self._rest = Rest(self._rules.patience, self._rules.longest_rest)
        self._net = RunningMean(0.0)  # plain steps that a round of drafting gained, waiting for drafts paid
        self._cheap: dict[tuple[str, int], bool] = {}  # by drafter and sequences, until the next review
        self._slopes: dict[int, float] = {}  # by sequences, until the next step
        self._lives = Lives(_LIFE)
        self._steps = 0

    def awake(self) -> bool:
        self._plan = None
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
        if self._is_cheap(name, len(ids)) or not any(most):
            return most
        if self._rules.crowd is not None and len(ids) > self._rules.crowd:
            return [0] * len(most)
        if not self._draft_costs.known(name):
            return self._introduction(name, most)
        if self._plan is None:
            self._plan = self._affordable(self._plan_round(ids, most, standing, unread), unread)
        chosen = [max(depth, min(self._low, limit)) for depth, limit in zip(self._plan[name], most, strict=True)]
        if any(chosen):
            self._probes.pop(name, None)
            return chosen
        return self._probed(name, most, unread)

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        self._plan = None
        kept = [subset(draft, nodes) for draft, nodes in zip(drafts, self._keep(drafts), strict=True)]
        if any(kept):
            self._probes.pop(_VERIFICATION, None)
            self._judge()
        elif any(drafts):
            self._rest.count()
            self._probe_verification(drafts, kept)
        return kept

    def _judge(self) -> None:
        """A round of drafting is of use where rounds like it have paid for themselves lately, deciding included."""
        if self._net.value >= 0:
            self._rest.end()
        else:
            self._rest.count()

    def _probe_verification(self, drafts: Sequence[Draft], kept: list[Draft]) -> None:
        """Now and then a beginning is verified although it does not seem to pay."""
        if self._probe(_VERIFICATION).due(self._rules.last_probe):
            longest = max(range(len(drafts)), key=lambda i: len(drafts[i]))
            kept[longest] = head(drafts[longest], self._rules.probe_depth)

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        drafted = sum(trial.verdict.drafted for trial in trials)
        self._spare_rows = max(0, timing.rows - drafted - len(trials))
        self._costs.update(timing)
        self._slopes.clear()
        sequences = max(1, len(trials))
        costly = [name for name in calls if not self._is_cheap(name, sequences)]
        review = self._steps % _REVIEW == 0  # what is cheap is looked at now and then, the others always
        self._draft_costs.update(calls if review else {name: calls[name] for name in costly})
        self._overhead_s.learn(timing.overhead_s)
        self._waited_s.learn(timing.draft_s)
        drafted_s = self._together([done.seconds for done in calls.values()])
        if drafted_s > 0:
            self._exposed.learn(exposure(timing.draft_s, drafted_s, timing.verify_s))
        self._rate.count(sum(len(trial.truth) for trial in trials), timing.total_s)
        self._settle(trials, timing, {name: calls[name].seconds for name in costly})
        self._lives.count(trials)
        self._steps += 1
        if self._steps % _REVIEW == 0:
            self._cheap.clear()

    def forget(self, sequence_id: int) -> None:
        self._lives.end(sequence_id)

    def _is_cheap(self, name: str, sequences: int) -> bool:
        """Whether a step of this drafter costs next to nothing of a verification."""
        cheap = self._cheap.get((name, sequences))
        if cheap is None:
            costs = self._draft_costs
            each = max(costs.turn(name, self.max_depth), costs.of(name).unread)
            limit = self._rules.cheap * self._plain_s(sequences)
            cheap = costs.known(name) and self._exposed.value * sequences * each <= limit
            self._cheap[name, sequences] = cheap
        return cheap

    def _introduction(self, name: str, most: Sequence[int]) -> list[int]:
        """A drafter of unknown price: a short draft for one sequence, as long as its account is not empty."""
        self._cheap.clear()  # its price may be known after this call
        if not self._covers(0.0):
            return [0] * len(most)
        return _only(most, max(range(len(most)), key=most.__getitem__), self._rules.probe_depth)

    def _plan_round(
        self, ids: Sequence[int], most: Sequence[int], standing: Sequence[Mapping[str, Draft]], unread: Unread
    ) -> Mapping[str, list[int]]:
        """Depths of all costly drafters for all sequences, chosen together."""
        known = self._draft_costs.known
        names = [name for name in self._draft_costs.names if known(name) and not self._is_cheap(name, len(ids))]
        worth = self._worth(len(ids))
        row = worth * self._slope(len(ids))
        beside = [standing_confidence(drafts.values(), row, self.max_depth) for drafts in standing]
        expected = [[self._estimates.expected(i, name, self.max_depth) for i in ids] for name in names]
        prices = [[self._exposed.value * worth * part for part in self._draft_costs.of(name)] for name in names]
        spread = min(1.0, _ROUND / self._lives.mean)  # over its life, of what it costs to begin with a sequence
        entry = [
            [price[2] * spread * unread(name, i) for i in range(len(ids))]
            for name, price in zip(names, prices, strict=True)
        ]
        if len(names) == 1:
            depths, gain = plan_alone(expected[0], most, beside, LonePrice(row, *prices[0][:2]), entry[0])
            rows = [depths]
        else:
            costs = np.array(prices)
            market = Market(row, costs[:, 0], costs[:, 1], self._serial, np.array(entry))
            planned, gain = plan_depths(np.array(expected), most, np.array(beside), market)
            rows = planned.tolist()
        enough = gain > self._margin(True, len(ids)) * len(ids)
        return dict(zip(names, rows if enough else [[0] * len(ids)] * len(names), strict=True))

    def _affordable(self, plan: Mapping[str, list[int]], unread: Unread) -> Mapping[str, list[int]]:
        """The plan as far as the account covers it: less deep, else one drafter for one sequence, else nothing."""
        for deepest in range(max(map(max, plan.values()), default=0), 0, -1):
            capped = {name: [min(depth, deepest) for depth in depths] for name, depths in plan.items()}
            prices = [self._price(name, depths, unread) for name, depths in capped.items() if any(depths)]
            if self._covers(self._together(prices)):
                return capped
        nothing = {name: [0] * len(depths) for name, depths in plan.items()}
        takers = [(unread(name, i), name, i) for name, depths in plan.items() for i, deep in enumerate(depths) if deep]
        if takers:
            _, name, first = min(takers)
            one = _only(plan[name], first, 1)
            if self._covers(self._price(name, one, unread)):
                return {**nothing, name: one}
        return nothing

    def _probed(self, name: str, most: Sequence[int], unread: Unread) -> list[int]:
        """A drafter that rests altogether is asked for a short draft now and then, if it could pay at its best."""
        able = [i for i, depth in enumerate(most) if depth]
        lucky = min(able, key=lambda i: unread(name, i))
        probe = _only(most, lucky, self._rules.probe_depth)
        affordable = self._covers(self._price(name, probe, unread))
        if affordable and self._could_pay(name, len(able)) and self._probe(name).due(self._rules.last_probe):
            return probe
        return [0] * len(most)

    def _could_pay(self, name: str, sequences: int) -> bool:
        """Whether one more token of everybody would be worth its price if it were always right."""
        drafting = self._exposed.value * self._draft_costs.of(name).of(1, sequences, 0)
        return self._worth(sequences) * (drafting + sequences * self._slope(sequences)) < sequences

    def _price(self, name: str, depths: Sequence[int], unread: Unread) -> float:
        """Seconds that the target waits for such a draft, reading what the drafter has not read yet included."""
        backlog = sum(unread(name, i) for i, depth in enumerate(depths) if depth)
        return self._exposed.value * self._draft_costs.of(name).of(max(depths), sum(depths), backlog)

    def _covers(self, seconds: float) -> bool:
        """Whether the account covers a draft of this price."""
        return self._account.covers(seconds / self._costs.time(1, 1))

    def _together(self, seconds: Sequence[float]) -> float:
        """Seconds of several drafters' calls: side by side, or one after another."""
        longest = max(seconds, default=0.0)
        return longest + self._serial * (sum(seconds) - longest)

    def _settle(self, trials: Sequence[Trial], timing: StepTiming, costly: Mapping[str, float]) -> None:
        """Book what costly drafting took (seconds), what verifying drafts took, and what accepted tokens saved."""
        one, income = self._costs.time(1, 1), self._rules.share * timing.total_s
        spent = self._exposed.value * self._together(list(costly.values()))
        self._account.book((income - spent) / one)
        self._rows_account.book(income / one)
        drafted = [trial for trial in trials if trial.verdict.drafted]
        net = -timing.draft_s / one
        if drafted:
            token, row = self._plain_s(len(trials)) / len(trials) / one, self._slope(len(trials)) / one
            for trial in drafted:
                gained = len(trial.verdict.accepted) * token - trial.verdict.drafted * row
                net += gained
                self._rows_account.book(gained)
                if trial.submitted.drafter in costly:
                    self._account.book(gained)
        if drafted or timing.draft_s > 0:
            self._net.learn(net, min(0.1, _PATIENT * len(trials)))

    def _worth(self, sequences: int) -> float:
        """Tokens that the engine gains per second."""
        return self._rate.per_second(sequences, self._plain_s(sequences))

    def _plain_s(self, sequences: int) -> float:
        """Seconds of a step without drafts."""
        return self._costs.time(sequences, sequences + self._spare_rows) + self._overhead_s.value

    def _slope(self, sequences: int) -> float:
        """Seconds that one more row costs, around here."""
        slope = self._slopes.get(sequences)
        if slope is None:
            rows = sequences + self._spare_rows
            extra = max(1, sequences * self.max_depth // 2)
            slope = (self._costs.time(sequences, rows + extra) - self._costs.time(sequences, rows)) / extra
            self._slopes[sequences] = slope
        return slope

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

    def _best_count(self, probabilities: Sequence[float], sequences: int) -> int:
        """How many of the ranked tokens give the most tokens per second; 0 unless the gain beats the margin."""
        if not probabilities:
            return 0
        times = self._costs.times(sequences, sequences + self._spare_rows, len(probabilities) + 1)
        besides = self._overhead_s.value + self._waited_s.value
        plain = highest = sequences / (times[0] + besides)
        best, tokens = 0, float(sequences)
        for count, (p, seconds) in enumerate(zip(probabilities, times[1:], strict=True), start=1):
            tokens += p
            goodput = tokens / (seconds + besides)
            if goodput > highest:
                best, highest = count, goodput
        self._on = highest > plain * (1 + self._margin(self._on, sequences))
        return min(best, self._affordable_rows(sequences)) if self._on else 0

    def _margin(self, on: bool, sequences: int) -> float:
        """The share that a prediction must gain, with speculation on or off."""
        margin = self._rules.margin_on if on else self._rules.margin_off
        return margin + self._rules.margin_crowd * (sequences - 1)

    def _affordable_rows(self, sequences: int) -> int:
        """Rows that may be tried, were none of them accepted."""
        return int(self._rows_account.balance * self._costs.time(1, 1) / max(self._slope(sequences), 1e-12))

    def _probe(self, key: str) -> Probe:
        return self._probes.setdefault(key, Probe(self._rules.first_probe))


def _only(values: Sequence[int], index: int, depth: int) -> list[int]:
    """Nobody but one, at most so deep."""
    chosen = [0] * len(values)
    chosen[index] = min(depth, values[index])
    return chosen


def _survival(draft: Draft) -> list[float]:
    """Survival of a draft; one of unknown confidence is taken as a fair coin per token."""
    if draft.confidence is not None:
        return survival(draft)
    return [0.5 ** len(draft.path(node)) for node in range(len(draft))]


def standing_confidence(drafts: Iterable[Draft], row: float, depth: int) -> list[float]:
    """Confidence by position, 0 behind its end, of the draft that gains most where verifying a row costs so much."""
    best: tuple[float, tuple[float, ...]] = (0.0, ())
    for draft in drafts:
        if draft.is_chain and draft.confidence:
            best = max(best, (max(accumulate(p - row for p in survival(draft))), draft.confidence))
    return [*best[1][:depth], *[0.0] * (depth - len(best[1]))]


def exposure(waited_s: float, drafted_s: float, verify_s: float) -> float:
    """What share of its time one more drafting step would cost the target.

    All of it where the target waits for drafts. Where drafting is hidden behind verifying nothing, until it takes about
    as long as verifying: beyond that every step is waited for.
    """
    if waited_s > 0.5 * drafted_s or verify_s <= 0:
        return 1.0
    beyond = (drafted_s / verify_s - _HIDDEN) / (1.1 - _HIDDEN)
    return min(1.0, max(waited_s / drafted_s, beyond))
