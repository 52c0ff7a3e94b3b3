"""Rows as a table for people, on stderr; the record on stdout is for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str) -> None:
    """Print the chosen columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    console = Console(stderr=True)
    Console(stderr=True, width=max(console.width, 140)).print(table)


def cell(value: Any) -> str:
    """A value as it reads best."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
