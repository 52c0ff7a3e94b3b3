"""What trying a drafter may cost: simulated runs for every acceptance and price, against plain decoding.

One drafter (or several alike) of given acceptance per token and cost beside our own rules, on a machine of given costs.
The figure to look at is the smallest ratio: a drafter that cannot pay must not cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from outrider.bench.simulate import Mode, Simulation
from outrider.bench.simulated import GivenWorld, Machine, Traffic
from outrider.bench.world import Curve

#: Rows of a pass -> passes of one row: SmolLM2-135M on two cores.
CPU: Curve = ((1, 1.0), (2, 1.09), (5, 1.48), (8, 2.0), (16, 3.3), (32, 5.6))
ACCEPTANCES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
COSTS = (0.002, 0.01, 0.03, 0.07, 0.2, 0.4, 0.67, 1.5)
READING = (0.0, 0.06)


@dataclass(frozen=True)
class WorstCase:
    """One drafter and what became of it."""

    acceptance: float  # per token
    cost: float  # of one drafted token, in target passes of one row
    reading: float  # of one token of the prompt, likewise
    drafters: int
    tokens: int  # of the answer
    ratio_to_plain: float


def worst_case(
    acceptance: float, cost: float, reading: float, drafters: int = 1, tokens: int = 128, requests: int = 1
) -> WorstCase:
    """One stream with a prompt of 100 tokens, hedge vote and goodput length."""
    skills = tuple({"any": acceptance} for _ in range(drafters))
    per_sequence = ((1, cost), (32, cost * 5.6))
    machine = Machine("given", CPU, per_sequence, skills, overhead_s=0.05, catch_up_s=reading, parallel=False)
    world = GivenWorld(machine, Traffic(("any",), requests, tokens, prompt=100))
    plain = Simulation(world, Mode("plain", "none"), 1, 1).run().clock.now
    ours = Mode("ours", "ours", tuple(world.names()), "hedge", "goodput", 8)
    ratio = plain / Simulation(world, ours, 1, 1).run().clock.now
    return WorstCase(acceptance, cost, reading, drafters, tokens, ratio)


def worst_cases(
    acceptances: Sequence[float] = ACCEPTANCES,
    costs: Sequence[float] = COSTS,
    reading: Sequence[float] = READING,
    drafters: int = 1,
    tokens: int = 128,
) -> list[WorstCase]:
    """The whole grid."""
    return [worst_case(a, c, r, drafters, tokens) for r, c, a in product(reading, costs, acceptances)]
