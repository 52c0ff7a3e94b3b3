"""What selections hold of the attention, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loading import repeating_folder
from outrider import LLM
from outrider.bench.eval_captured import captured_texts, measure_captured

SETTINGS = {"sinks": 2, "window": 4, "group": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = repeating_folder(tmp_path_factory.mktemp("captured") / "model")
    with LLM(folder, page_size=4, max_num_seqs=1, threads=1, speculative_config=None) as made:
        yield made


def test_selectors_are_judged_beside_the_best_shared_set(llm) -> None:
    prompt = "".join(chr(c) for c in np.random.default_rng(0).integers(97, 123, 150))
    rows = measure_captured(llm, {"letters": prompt}, [24, 48], SETTINGS, steps=6)
    assert [(row["budget"], row["selector"]) for row in rows] == [(b, s) for b in (24, 48) for s in ("pages", "window")]
    for row in rows:
        assert row["steps"] >= 5
        assert 0 < row["captured"] <= row["oracle_grouped"] + 1e-6
        assert row["of_oracle"] == pytest.approx(row["captured"] / row["oracle_shared"])
        assert 0 <= row["moved"] < 1
    small, large = (next(r["captured"] for r in rows if (r["budget"], r["selector"]) == (b, "pages")) for b in (24, 48))
    assert large > small


def test_a_budget_that_holds_everything_has_nothing_to_tell(llm) -> None:
    assert measure_captured(llm, {"letters": "abc" * 9}, [200], SETTINGS, steps=3) == []


def test_texts_are_those_that_are_at_hand(tmp_path: Path) -> None:
    (tmp_path / "war_and_peace.txt").write_text("A paragraph of more than forty letters, to fill the text.\n\n" * 50)
    texts = captured_texts(tmp_path, 200, lambda text: len(text.split()), 0)
    assert list(texts) == ["key_value", "prose"]
    assert list(captured_texts(None, 200, len, 0)) == ["key_value"]
