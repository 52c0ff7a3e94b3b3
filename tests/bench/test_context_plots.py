"""The picture of speed against length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.context_plots import main, read_rows
from outrider.errors import ConfigError


def record(path: Path, tokens: int) -> Path:
    rows = [
        {"mode": "full", "budget": None, "context_tokens": tokens, "output_tokens_per_second": 1e5 / tokens},
        {"mode": "sparse", "budget": 512, "context_tokens": tokens, "output_tokens_per_second": 90.0},
    ]
    path.write_text(json.dumps({"schema": "outrider.bench/1", "rows": rows}))
    return path


def test_records_of_several_lengths_become_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [record(tmp_path / f"{n}.json", n) for n in (2048, 4096)]
    assert [row["reads"] for row in read_rows(paths)] == ["full", "sparse, budget 512"] * 2
    main([*map(str, paths), "--out", str(tmp_path / "speed.png")])
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="no record"):
        read_rows([tmp_path / "x.json"])
