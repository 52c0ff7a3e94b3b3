"""Speed against length, as a picture, from records of `outrider bench context` at several lengths.

for n in 2048 4096 8192; do outrider bench context smollm2-135m --context $n --out context-$n.json; done
python -m outrider.bench.context_plots context-*.json --out speed.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.eval_plots import plot_lines
from outrider.errors import ConfigError


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of several records, each with a name for its way of reading. ConfigError where a file is no record."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            rows += [{**row, "reads": name_way(row)} for row in record["rows"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of outrider bench context ({error})", "records") from None
    return rows


def name_way(row: dict[str, Any]) -> str:
    """Mode and budget."""
    return row["mode"] if row["budget"] is None else f"{row['mode']}, budget {row['budget']}"


def draw_speed(records: Sequence[Path], out: Path) -> None:
    """One line per way of reading: decoded tokens per second at every length of context."""
    labels = ("context, tokens", "tokens per second")
    rows = read_rows(records)
    plot_lines(rows, "context_tokens", "output_tokens_per_second", "reads", out, "Speed against length", labels)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.context_plots", description=draw_speed.__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    draw_speed(given.records, given.out)


if __name__ == "__main__":
    main()
