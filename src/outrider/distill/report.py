"""The summary page of a run: curves and acceptance, as one static HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.distill.files import replacing

WIDTH, HEIGHT, MARGIN = 640, 240, 42
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#57606a")
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:720px;margin:2em auto;padding:0 1em}"
    "td,th{padding:2px 12px;text-align:left}"
)


def write_report(path: Path, title: str, facts: Mapping[str, Any], history: Sequence[dict], scores: dict) -> None:
    """Replace the page. history: points of the curves; scores: acceptance by domain (acceptance.summary)."""
    right = sorted({name for point in history for name in point if name.startswith("right_")})
    attention = ["attention"] if any(point.get("attention") for point in history) else []
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        table(("", ""), [(name, value) for name, value in facts.items()]),
        "<h2>Loss</h2>",
        chart(history, ["loss", "kl", *attention]),
        "<h2>Tokens drafted right, by step of the unrolled head (training)</h2>",
        chart(history, right),
        "<h2>Acceptance on held-out prompts</h2>",
        table(
            ("kind", "prompts", "acceptance length", "95 %", "by position"), [_row(*item) for item in scores.items()]
        ),
        bars({name: score["acceptance_length"] for name, score in scores.items()}),
    ]
    page = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    with replacing(path) as partial:
        partial.write_text(page + "\n".join(parts) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table."""
    lines = [f"<tr>{''.join(f'<th>{html.escape(str(cell))}</th>' for cell in head)}</tr>"] if any(head) else []
    lines += [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def chart(history: Sequence[dict], names: Sequence[str]) -> str:
    """Curves of some figures over the updates, as SVG."""
    series = {name: [(p["update"], p[name]) for p in history if name in p] for name in names}
    points = [point for values in series.values() for point in values]
    if not points:
        return "<p>No updates were made.</p>"
    last = max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(1e-9, *(y for _, y in points))

    def place(x: float, y: float) -> str:
        across = MARGIN + (WIDTH - MARGIN - 8) * x / last
        return f"{across:.1f},{HEIGHT - 24 - (HEIGHT - 40) * (y - low) / (high - low):.1f}"

    lines = [_axis(low, high, last)]
    for colour, values in zip(COLOURS * 2, series.values(), strict=False):
        path = " ".join(place(x, y) for x, y in values)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
    legend = " ".join(f'<tspan fill="{c}">{html.escape(n)}</tspan>' for c, n in zip(COLOURS * 2, series, strict=False))
    lines.append(f'<text x="{MARGIN}" y="12" font-size="12">{legend}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(lines)}</svg>'


def bars(values: Mapping[str, float]) -> str:
    """Horizontal bars of acceptance lengths, from 1 (nothing accepted)."""
    longest = max([value - 1 for value in values.values()] or [1]) or 1
    lines = []
    for i, (name, value) in enumerate(values.items()):
        y, length = 22 * i, (WIDTH - 180) * (value - 1) / longest
        lines.append(f'<text x="0" y="{y + 15}" font-size="13">{html.escape(name)}</text>')
        lines.append(f'<rect x="90" y="{y + 3}" width="{length:.1f}" height="15" fill="{COLOURS[0]}"/>')
        lines.append(f'<text x="{96 + length:.1f}" y="{y + 15}" font-size="13">{value:.2f}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {22 * len(values) + 6}" role="img">{"".join(lines)}</svg>'


def _axis(low: float, high: float, last: int) -> str:
    marks = [(low, HEIGHT - 24), ((low + high) / 2, HEIGHT / 2 - 4), (high, 16)]
    texts = [f'<text x="0" y="{y + 4:.0f}" font-size="11">{value:.3g}</text>' for value, y in marks]
    lines = [f'<path d="M{MARGIN} {y:.0f}H{WIDTH - 8}" stroke="#d0d7de"/>' for _, y in marks]
    return "".join(lines + texts) + f'<text x="{WIDTH - 90}" y="{HEIGHT - 6}" font-size="11">{last} updates</text>'


def _row(name: str, score: Mapping[str, Any]) -> tuple[Any, ...]:
    low, high = score["interval"]
    positions = " ".join(f"{share:.2f}" for share in score["per_position"])
    return name, score["prompts"], f"{score['acceptance_length']:.2f}", f"{low:.2f} - {high:.2f}", positions
