"""What deciding costs: processor time of votes, weights and lengths per step, on recorded answers.

    python scripts/control.py traces.jsonl --batch 1 --drafters ngram,suffix

Traces come from scripts/record_traces.py. The policies are those of "auto" and run for real; drafters say what they
said when the traces were recorded (or a head that does not exist, with --head ACCEPTANCE), and their time is not
counted. Every run takes the same decisions, so the least of several is the figure. In an engine it comes to about twice
that: there a pass over the weights empties the caches between two steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

from outrider.api.core import AUTO
from outrider.bench.recorded import RecordedWorld, WhatIf
from outrider.bench.simulate import Mode, Simulation
from outrider.bench.traces import read_traces


class Meter:
    """Processor seconds spent inside some calls, those inside others left out."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def count(self, call: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """The same call, metered; with sign -1 what it takes is taken off again."""

        def metered(*args: Any) -> Any:
            started = thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += sign * (thread_time() - started)

        return metered


def control_ms(world: RecordedWorld, names: tuple[str, ...], batch: int) -> float:
    """Milliseconds per step of one run."""
    mode = Mode("auto", "ours", names, "hedge", "goodput", 8, length_options=AUTO.length_options)
    simulation, meter = Simulation(world, mode, batch, batch), Meter()
    speculator: Any = simulation._speculator
    speculator.draft, speculator.observe = meter.count(speculator.draft), meter.count(speculator.observe)
    for drafter in simulation._drafters:
        drafter.propose = meter.count(drafter.propose, -1)  # type: ignore[method-assign]
        drafter.observe = meter.count(drafter.observe, -1)  # type: ignore[method-assign]
    simulation.run()
    return 1e3 * meter.seconds / speculator.report().steps


def main() -> None:
    """Print one JSON record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--drafters", help="comma-separated; default: all of the traces")
    parser.add_argument("--head", type=float, help="acceptance of a head to add, at 5 %% of a pass per token")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    what_if = {} if given.head is None else {"head": WhatIf(given.head, 0.05, 0.01)}
    world = RecordedWorld(read_traces(given.traces), what_if=what_if)
    names = tuple(given.drafters.split(",")) if given.drafters else tuple(world.names())
    times = [control_ms(world, names, given.batch) for _ in range(given.rounds)]
    print(json.dumps({"batch": given.batch, "drafters": names, "control_ms_per_step": round(min(times), 4)}))


if __name__ == "__main__":
    main()
