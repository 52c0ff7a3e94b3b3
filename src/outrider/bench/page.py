"""A benchmark as one static page: tables and charts inline, nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.bench.charts import drafters_chart, time_chart
from outrider.bench.speed import Case
from outrider.bench.table import cell

_STYLE = """body{font:14px/1.5 system-ui,sans-serif;max-width:1150px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{border-bottom:1px solid #ddd;padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}pre{background:#f6f6f6;padding:1em;
overflow:auto}"""


def write_page(
    path: Path, title: str, record: Mapping[str, Any], cases: Sequence[Case], columns: Sequence[str]
) -> None:
    """Write the page, whole or not at all. `cases` are those of the record's rows; plain ones have no charts."""
    parts = [f"<h1>{escape(title)}</h1>", html_table(record["rows"], columns)]
    for case in cases:
        if case.report.drafters and case.task == "mixed":
            together = [c for c in cases if (c.mode, c.concurrency) == (case.mode, case.concurrency)]
            parts.append(section(case, together))
    about = {key: record[key] for key in ("commit", "hardware", "config")}
    parts.append(f"<h2>Run</h2><pre>{escape(json.dumps(about, indent=2, default=str))}</pre>")
    text = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>" + "".join(parts)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def section(case: Case, tasks: Sequence[Case]) -> str:
    """One way to speculate: its drafters by task, and how the mixed stream went over time."""
    rows = [
        {
            "drafter": drafter.name,
            "asked": drafter.rounds,
            "proposed": drafter.proposals,
            "verified": drafter.drafts,
            "tokens": drafter.draft_tokens,
            "accepted": drafter.accepted_tokens,
            "acceptance length": drafter.acceptance_length,
            "votes won": drafter.votes_won,
            "weight": drafter.weight,
            "ms per round": 1e3 * drafter.time_s / max(1, case.report.steps),
            "off": drafter.off,
        }
        for drafter in case.report.drafters
    ]
    heading = f"<h2>{escape(case.mode)}, {case.concurrency} at a time</h2>"
    return heading + html_table(rows, list(rows[0])) + drafters_chart(tasks) + time_chart(case.report)


def html_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as an HTML table."""
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(row.get(column)))}</td>" for column in columns) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
