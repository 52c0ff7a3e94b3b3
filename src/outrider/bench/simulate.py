"""A discrete-event simulator of the collective, adaptive, pipelined system on machines one does not have.

It drives the real policies (speculation/: votes, lengths, pools, flow control) with drafters and a target that are
acceptance models and cost tables. It says what the scheduler makes of given costs; it does not say what a model costs.

    outrider bench simulate                              the ablation on given costs
    outrider bench simulate --traces traces.jsonl        the same on recorded answers

Not modelled: prompt processing, and memory other than as a bound on the requests in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from outrider.bench.simulated import GivenWorld, Machine, Traffic
from outrider.bench.world import Clock, World
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Context, Observation
from outrider.speculation.build import assemble
from outrider.speculation.guard import GuardRules
from outrider.speculation.none import NoSpeculator
from outrider.speculation.pools import FlowControl, LittleFlow, Pools, PublishedFlow
from outrider.speculation.rehearsal import GREEDY
from outrider.speculation.timing import StepTiming
from outrider.types import Draft

_PATIENT = GuardRules(max_slow=1 << 30)  # simulated drafters are as slow as they were told to be

TASKS = ("chat", "maths", "code", "translation")


def specialists(own: float, other: float) -> tuple[dict[str, float], ...]:
    """One drafter per task: `own` acceptance on it, `other` elsewhere."""
    return tuple({task: own if task == mine else other for task in TASKS} for mine in TASKS)


#: Llama2-70B (fp16, tensor-parallel on four 80 GB accelerators) with Llama-160M drafters: given, not measured. 140 GB
#: of weights at 6.4 TB/s are 22 ms, 160 all-reduces 4 ms, arithmetic takes over at about 128 rows; a 160M model of 12
#: layers is bound by kernel launches.
LLAMA2_70B = Machine(
    name="Llama2-70B, 160M drafters, 4 accelerators",
    verify=((1, 0.026), (16, 0.027), (80, 0.031), (128, 0.036), (256, 0.058), (512, 0.110)),
    draft=((1, 0.0040), (16, 0.0042), (32, 0.0045), (64, 0.0055)),
    skills=specialists(0.80, 0.50),
    overhead_s=0.002,
)

#: What the paper reports for each step over the one before (SC '25, Llama2-70B and OPT-13B on 4 A100).
PUBLISHED = {"+ vote": (59.8, 9.6), "+ length": (5.9, 35.1), "+ pipeline": (55.4, 34.3)}


_ALONE = "+ one drafter"


@dataclass(frozen=True)
class Mode:
    """One row of the ablation."""

    step: str
    rules: Literal["none", "published", "ours"]
    drafters: tuple[str, ...] = ()  # none: plain decoding
    vote: Literal["none", "majority", "hedge"] = "none"
    length: Literal["fixed", "trend", "goodput"] = "fixed"
    tokens: int = 4  # draft length, or its upper bound
    pipeline: bool = False
    vote_options: Mapping[str, Any] | None = None
    length_options: Mapping[str, Any] | None = None

    def flow(self) -> FlowControl:
        """The rule that pauses the drafters."""
        return LittleFlow() if self.rules == "ours" else PublishedFlow()


def modes(names: Sequence[str], each: bool = False) -> list[Mode]:
    """plain, + one drafter (the first, or each in turn), then each step by the published rules and by ours."""
    drafters = tuple(names)
    alone = [Mode(f"{_ALONE}: {name}", "none", (name,)) for name in names]
    return [
        Mode("plain", "none"),
        *(alone if each else [Mode(_ALONE, "none", drafters[:1])]),
        Mode("+ vote", "published", drafters, "majority"),
        Mode("+ length", "published", drafters, "majority", "trend", 10),
        Mode("+ pipeline", "published", drafters, "majority", "trend", 10, True),
        Mode("+ vote", "ours", drafters, "hedge"),
        Mode("+ length", "ours", drafters, "hedge", "goodput", 10),
        Mode("+ pipeline", "ours", drafters, "hedge", "goodput", 10, True),
    ]


@dataclass(frozen=True)
class Row:
    """What one mode gave. Gains in percent; times in ms per verification."""

    step: str
    rules: str
    tokens_per_second: float
    gain: float  # over the step before, by the same rules
    total: float  # factor over one drafter
    acceptance_length: float
    draft_ms: float
    exposed_ms: float  # of drafting, that the target waited for
    verify_ms: float
    pool_level: float  # drafts that wait when a verification starts
    published_gain: tuple[float, float] | None = None


class Simulation:
    """One mode in one world, event by event."""

    def __init__(self, world: World, mode: Mode, batch: int, in_flight: int) -> None:
        self.clock = Clock()
        self._world, self._mode, self._batch = world, mode, batch
        self._drafters = [world.drafter(name, self.clock) for name in mode.drafters]
        self._speculator = self._assemble()
        self._pools = Pools[Draft](in_flight)
        self._tokens: dict[int, list[int]] = {r: list(world.prompt(r)) for r in range(world.requests)}
        self._pools.add(range(world.requests))
        self._flow = mode.flow()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._drafting = self._verifying = False
        self._draft_s, self._idle_since = 0.0, 0.0
        self._steps, self._levels = 0, 0
        self._drafted_s = self._exposed_s = self._verified_s = 0.0

    def run(self) -> Simulation:
        """Until every request has its tokens."""
        self._turn()
        while self._events:
            self.clock.now, _, event = heapq.heappop(self._events)
            event()
            self._turn()
        assert not len(self._pools), "a request was lost"
        return self

    def row(self, before: Row | None, one_drafter: Row | None) -> Row:
        """The record of a finished run."""
        speed = sum(map(self._world.length, range(self._world.requests))) / self.clock.now
        per_step = 1e3 / self._steps
        return Row(
            step=self._mode.step,
            rules=self._mode.rules,
            tokens_per_second=speed,
            gain=100 * (speed / before.tokens_per_second - 1) if before else 0.0,
            total=speed / one_drafter.tokens_per_second if one_drafter else 1.0,
            acceptance_length=self._speculator.report().acceptance_length,
            draft_ms=self._drafted_s * per_step,
            exposed_ms=self._exposed_s * per_step,
            verify_ms=self._verified_s * per_step,
            pool_level=self._levels / self._steps,
            published_gain=PUBLISHED.get(self._mode.step),
        )

    def _assemble(self) -> Any:
        if not self._drafters:
            return NoSpeculator()
        config = SpeculativeConfig(
            num_speculative_tokens=self._mode.tokens,
            vote=self._mode.vote,
            length=self._mode.length,
            vote_options=self._mode.vote_options,
            length_options=self._mode.length_options,
        )
        made = assemble(
            self._drafters, config, 1 << 30, _PATIENT, self._world.verify_s, self.clock, self._world.parallel
        )
        self.clock.now = 0.0  # measuring at start is not part of the run
        return made

    def _turn(self) -> None:
        """Start whatever may start now. Without the pipeline, drafting and verifying take turns."""
        alone = not self._mode.pipeline
        if not self._verifying and self._pools.level and not (alone and self._drafting):
            self._verify(self._pools.withdraw(self._batch))
        paused = self._pools.level >= self._flow.target(self._batch) or (alone and self._verifying)
        if not self._drafting and self._pools.ready and not paused:
            self._draft(self._pools.claim(self._batch))

    def _draft(self, requests: list[int]) -> None:
        """Draft for these requests; done when the slowest drafter (or, on one device, the last) is."""
        started, self._drafting = self.clock.now, True
        for drafter in self._drafters:
            drafter.spent_s = 0.0
        contexts = [Context(r, self._tokens[r], len(self._world.prompt(r)), GREEDY) for r in requests]
        room = [max(0, self._left(request) - 1) for request in requests]
        drafts = self._speculator.draft(contexts, room)
        spent = [drafter.spent_s for drafter in self._drafters] or [0.0]
        self._draft_s = max(spent) if self._world.parallel else sum(spent)
        self._drafted_s += self._draft_s
        self.clock.now = started
        self._after(self._draft_s, lambda: self._deliver(requests, drafts))

    def _deliver(self, requests: list[int], drafts: list[Draft]) -> None:
        self._drafting = False
        for request, draft in zip(requests, drafts, strict=True):
            self._pools.deliver(request, draft)

    def _verify(self, batch: list[tuple[int, Draft]]) -> None:
        self._verifying = True
        self._steps += 1
        self._levels += self._pools.level + len(batch)
        rows = sum(1 + len(draft) for _, draft in batch)
        waited, took = self.clock.now - self._idle_since, self._world.verify_s(rows)
        timing = StepTiming(waited, took, self._world.overhead_s, len(batch), rows)
        self._exposed_s += waited
        self._verified_s += took
        self._after(took + self._world.overhead_s, lambda: self._observe(batch, timing))

    def _observe(self, batch: list[tuple[int, Draft]], timing: StepTiming) -> None:
        """The target has spoken: requests go on or end."""
        self._verifying, self._idle_since = False, self.clock.now
        seen = []
        for request, draft in batch:
            known = len(self._tokens[request])
            answered = known - len(self._world.prompt(request))
            verdict = self._world.judge(request, answered, draft)
            self._tokens[request] += verdict.tokens
            seen.append(Observation(request, known, verdict.tokens, verdict))
        self._speculator.observe(seen, timing)
        self._flow.observe(self._draft_s, timing.verify_s)
        for request, _ in batch:
            if self._left(request) > 0:
                self._pools.resume(request)
            else:
                self._pools.remove(request)
                self._speculator.forget(request)

    def _left(self, request: int) -> int:
        """Tokens still to come."""
        return self._world.length(request) - len(self._tokens[request]) + len(self._world.prompt(request))

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now + delay, next(self._order), event))


def ablation(world: World | None = None, batch: int = 16, each: bool = False) -> list[Row]:
    """Every mode in turn on the same requests; twice the batch is in flight, so that a pipeline has what to draft.

    `each`: every drafter alone, too; the steps are then compared with the best of them, chosen with hindsight.
    """
    world = world or GivenWorld(LLAMA2_70B, Traffic(TASKS))
    rows: list[Row] = []
    last: dict[str, Row] = {}
    for mode in modes(world.names(), each):
        alone = [row for row in rows if row.step.startswith(_ALONE)]
        best = max(alone, key=lambda row: row.tokens_per_second, default=None)
        before = last.get(mode.rules) or best
        if mode.step.startswith(_ALONE):
            before, best = rows[0], None
        row = Simulation(world, mode, batch, 2 * batch).run().row(before, best)
        if mode.rules != "none":
            last[mode.rules] = row
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The ablation as a Markdown table, the paper's percentages beside it."""
    lines = [
        "| step | rules | tokens/s | gain | over one drafter | acceptance length | draft / exposed / verify ms | pool "
        "| paper: 70B, 13B |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper = "".join(f"{gain:+.1f} % " for gain in row.published_gain).strip() if row.published_gain else ""
        lines.append(
            f"| {row.step} | {row.rules} | {row.tokens_per_second:.0f} | {row.gain:+.1f} % | {row.total:.2f}x "
            f"| {row.acceptance_length:.2f} | {row.draft_ms:.1f} / {row.exposed_ms:.1f} / {row.verify_ms:.1f} "
            f"| {row.pool_level:.1f} | {paper} |"
        )
    return "\n".join(lines)
