"""Pictures of an evaluation: accuracy against budget, speed against length, bytes per step, loads against layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

Row = Mapping[str, Any]


def plot_lines(
    rows: Sequence[Row], x: str, y: str, by: str, path: Path, title: str, labels: tuple[str, str], log_x: bool = True
) -> None:
    """One line per value of `by`: the mean of `y` at every `x`. Accuracy against budget, speed against length."""
    figure, axes = _figure()
    for name, points in series(rows, x, y, by).items():
        axes.plot([at for at, _ in points], [value for _, value in points], marker="o", label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def plot_depths(rows: Sequence[Row], path: Path, title: str) -> None:
    """Scores as a grid of length and depth: where in a context things are found."""
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    grid = [[_mean([r["score"] for r in rows if (r["length"], r["depth"]) == (n, d)]) for n in lengths] for d in depths]
    figure, axes = _figure()
    image = axes.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="RdYlGn")
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("depth")
    axes.set_title(title)
    figure.colorbar(image, label="accuracy")
    _save(figure, path)


def plot_moved(steps: Mapping[str, Sequence[int]], budget_bytes: int, path: Path) -> None:
    """Bytes moved in every step as a share of the budget's bytes, one line per way of selecting."""
    figure, axes = _figure()
    for name, moved in steps.items():
        axes.plot([count / budget_bytes for count in moved], label=name)
    axes.axhline(0.15, linestyle="--", linewidth=1, color="grey")
    axes.set_xlabel("step")
    axes.set_ylabel("bytes moved / bytes of the budget")
    axes.legend()
    _save(figure, path)


def plot_timeline(events: Sequence[tuple[str, int, float, float]], path: Path) -> None:
    """Loads against layers within a step: events (kind, layer, start, stop) in seconds, kind `load` or `compute`."""
    figure, axes = _figure()
    colours = {"load": "tab:orange", "compute": "tab:blue", "store": "tab:green"}
    for kind in dict.fromkeys(event[0] for event in events):
        own = [event for event in events if event[0] == kind]
        axes.barh(
            [layer for _, layer, _, _ in own],
            [1e3 * (stop - start) for _, _, start, stop in own],
            left=[1e3 * start for _, _, start, _ in own],
            height=0.8 if kind == "compute" else 0.4,
            color=colours.get(kind),
            label=kind,
        )
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began")
    axes.set_ylabel("layer")
    axes.legend()
    _save(figure, path)


def series(rows: Sequence[Row], x: str, y: str, by: str) -> dict[str, list[tuple[float, float]]]:
    """Means of y by x, for every value of `by`, in the order of first appearance."""
    values: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[str(row[by])][row[x]].append(row[y])
    return {name: [(at, _mean(points[at])) for at in sorted(points)] for name, points in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib; install outrider[plots]", "plots") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error}", "plots") from None
