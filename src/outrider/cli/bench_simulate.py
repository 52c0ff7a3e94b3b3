"""`outrider bench simulate`: what the scheduler makes of given costs, on machines one does not have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as opt
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.recorded import WhatIf
    from outrider.bench.world import World


def simulate(
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests verified at once; default: 16, on traces 1.")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Recorded answers (scripts/record_traces.py) in place of given acceptances.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="On traces, a drafter that does not exist: NAME=ACCEPTANCE,COST[,READING], costs in passes."),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Instead: every acceptance and price against plain.")] = False,
    drafters: Annotated[int, typer.Option(min=1, help="With --worst: drafters of that kind.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="With --worst: tokens of the answer.")] = 128,
    plot: Annotated[Path | None, typer.Option(help="Draw the chart into this .svg file (needs matplotlib).")] = None,
    out: opt.Out = None,
) -> None:
    """Simulate vote, length and pipeline, step by step: Llama2-70B on four accelerators, or recorded answers.

    On recorded answers the pipeline's drafters are taken to run beside the target, not on its cores.

    Example: outrider bench simulate --batch 16 --plot gains.svg
    Example: outrider bench simulate --traces traces.jsonl --what-if head=0.45,0.07,0.01
    Example: outrider bench simulate --worst --drafters 2
    """
    from outrider.bench import record, table
    from outrider.bench.simulate import LLAMA2_70B, ablation
    from outrider.bench.worst import worst_cases

    rows: list[Any]
    config: dict[str, Any]
    if worst:
        refuse(traces is not None or bool(what_if), "--worst", "leave --traces and --what-if out")
        rows, config = worst_cases(drafters=drafters, tokens=tokens), {"drafters": drafters, "tokens": tokens}
    else:
        refuse(bool(what_if) and traces is None, "--what-if", "give --traces too")
        world, size = recorded_world(traces, what_if or []), batch or (16 if traces is None else 1)
        rows = ablation(world, size, each=traces is not None)
        config = {"machine": LLAMA2_70B.name if traces is None else str(traces), "batch": size, "what_if": what_if}
    made = [asdict(row) for row in rows]
    table.show(made, list(made[0]), "simulated, not measured")
    if plot is not None:
        draw(plot, rows, worst)
    record.emit(record.new_record("simulate", config, made), out)


def recorded_world(traces: Path | None, what_if: list[str]) -> World | None:
    """The world of recorded answers; None: the given one."""
    if traces is None:
        return None
    from outrider.bench.recorded import RecordedWorld
    from outrider.bench.traces import read_traces

    return RecordedWorld(read_traces(traces), what_if=dict(map(parse_what_if, what_if)))


def parse_what_if(text: str) -> tuple[str, WhatIf]:
    """NAME=ACCEPTANCE,COST[,READING]."""
    from outrider.bench.recorded import WhatIf

    name, _, numbers = text.partition("=")
    try:
        acceptance, *costs = map(float, numbers.split(","))
    except ValueError:
        costs = []
    if not name or not 1 <= len(costs) <= 2 or not 0 <= acceptance <= 1 or min(costs) < 0:
        raise ConfigError(f"--what-if {text!r} is refused; write it like head=0.45,0.07,0.01", "--what-if")
    return name, WhatIf(acceptance, *costs)


def refuse(wrong: bool, option: str, fix: str) -> None:
    """Options that mean nothing together."""
    if wrong:
        raise ConfigError(f"{option} is refused here; {fix}", option)


def draw(path: Path, rows: list[Any], worst: bool) -> None:
    """The chart of what was simulated."""
    from outrider.bench.charts import gains_chart, worst_chart

    path.write_text((worst_chart if worst else gains_chart)(rows), encoding="utf-8")
