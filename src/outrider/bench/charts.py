"""Charts of benchmarks as SVG. matplotlib is optional: install outrider[plots]."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

from outrider.bench.simulate import Row
from outrider.bench.speed import Case
from outrider.bench.worst import WorstCase
from outrider.errors import ConfigError
from outrider.speculation.history import Moment
from outrider.speculation.report import SpeculationReport

_WIDE = (11.0, 3.0)  # inches


def gains_chart(rows: Sequence[Row]) -> str:
    """Speeds of an ablation over one drafter, the published gains in the labels."""
    figure = _figure((9.0, 4.0))
    axes = figure.subplots()
    names = [f"{row.step}\n{row.rules}" for row in rows]
    bars = axes.bar(names, [row.total for row in rows], color=[_color(row.rules) for row in rows])
    axes.bar_label(bars, [f"{row.total:.2f}x" for row in rows])
    axes.axhline(1.0, linestyle="--", linewidth=1, color="grey")
    axes.set_ylabel("speed over one drafter")
    axes.tick_params(axis="x", labelsize=7)
    return _svg(figure)


def worst_chart(cases: Sequence[WorstCase]) -> str:
    """Ratio to plain over acceptance, a line for every price."""
    figure = _figure(_WIDE)
    reading = sorted({case.reading for case in cases})
    for axes, price in zip(figure.subplots(1, len(reading), squeeze=False)[0], reading, strict=True):
        for cost in sorted({case.cost for case in cases}):
            line = [case for case in cases if (case.cost, case.reading) == (cost, price)]
            axes.plot([c.acceptance for c in line], [c.ratio_to_plain for c in line], marker=".", label=f"{cost:g}")
        axes.axhline(0.97, linestyle="--", linewidth=1, color="grey")
        axes.set_title(f"a prompt token costs {price:g} passes", fontsize=9)
        axes.set_xlabel("acceptance per token")
        axes.set_ylabel("speed over plain")
        axes.legend(title="cost of a token", fontsize=6, title_fontsize=6)
    return _svg(figure)


def drafters_chart(cases: Sequence[Case]) -> str:
    """Per drafter and task: how often a token it proposed was right where it was asked, and the votes it won."""
    figure = _figure(_WIDE)
    accepted, won = figure.subplots(1, 2)
    names = list(dict.fromkeys(drafter.name for case in cases for drafter in case.report.drafters))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        places = [index + (number - (len(names) - 1) / 2) * width for index in range(len(cases))]
        told = [{d.name: d for d in case.report.drafters}.get(name) for case in cases]
        lengths = [0.0 if d is None else d.acceptance_length for d in told]
        accepted.bar(places, lengths, width, label=name)
        won.bar(places, [0 if d is None else d.votes_won for d in told], width, label=name)
    for axes, label in ((accepted, "acceptance length"), (won, "votes won")):
        axes.set_xticks(range(len(cases)), [case.task for case in cases], rotation=20, fontsize=7)
        axes.set_ylabel(label)
        axes.legend(fontsize=7)
    return _svg(figure)


def time_chart(report: SpeculationReport) -> str:
    """Over the steps: weights, draft length, milliseconds by phase, and the level of the pool."""
    figure = _figure((11.0, 5.0))
    (weights, lengths), (phases, pool) = figure.subplots(2, 2)
    moments, steps = report.history, [moment.until for moment in report.history]
    for name in dict.fromkeys(name for moment in moments for name in moment.weights):
        weights.plot(steps, [moment.weights.get(name, 0.0) for moment in moments], label=name)
    lengths.plot(steps, [moment.length for moment in moments], label="verified")
    lengths.plot(steps, [_per(moment, moment.accepted) for moment in moments], label="accepted")
    parts = [[1e3 * getattr(m, part) / m.steps for m in moments] for part in ("draft_s", "verify_s", "overhead_s")]
    phases.stackplot(steps, *parts, labels=("draft", "verify", "overhead"))
    pool.plot(steps, [moment.pool / moment.steps for moment in moments], label="drafts waiting")
    titles = ("share of the vote", "tokens per draft", "ms per round", "pool level")
    for axes, label in zip((weights, lengths, phases, pool), titles, strict=True):
        axes.set_ylabel(label)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return _svg(figure)


def _per(moment: Moment, count: int) -> float:
    return count / moment.sequences if moment.sequences else 0.0


def _color(rules: str) -> str:
    return {"published": "tab:orange", "ours": "tab:blue"}.get(rules, "tab:grey")


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("charts need matplotlib; install outrider[plots]", "plots") from None
    return Figure(figsize=size, layout="constrained")


def _svg(figure: Any) -> str:
    """The figure as one <svg> element, text kept as text."""
    import matplotlib

    buffer = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrider"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
