"""How reading less of a context begins: the first steps of an answer, and what a prompt leaves for selections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contexts import GREEDY, LONG, answers, start
from loading import repeating_folder

SPARSE = {"mode": "sparse", "budget": 24, "sinks": 2, "window": 4, "group": 1, "first_full": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("context") / "model")


def test_prompts_of_any_length_are_summarised_in_parts(folder, monkeypatch) -> None:
    """A restored prompt comes all at once; its keys are not to be copied as floats in one piece."""
    monkeypatch.setattr("outrider.memory.reading.FOLD_AT_ONCE", 7)
    with start(folder, SPARSE) as llm:
        reading, sizes = llm.core.memory.reading, []
        fold = reading.reader.fold
        monkeypatch.setattr(reading.reader, "fold", lambda slots, keys: (sizes.append(len(slots)), fold(slots, keys)))
        said = answers(llm)
    assert max(sizes) == 7
    with start(folder, SPARSE) as llm:
        assert answers(llm) == said


def test_lossless_drafts_select_from_the_first_token_on(folder) -> None:
    """Full steps at first would only keep the target from drafting: its answer is exact anyway."""
    context = {**SPARSE, "mode": "lossless", "first_full": None}
    with start(folder, context, speculative_config=None) as llm:
        drafted = llm.generate(LONG[0], replace(GREEDY, max_tokens=5))[0].metrics.speculative.num_draft_tokens
        report = llm.speculation_report().context
    assert drafted > 0
    assert report.sparse_steps > 0
    assert report.full_steps == 0


def test_short_answers_say_what_their_selections_captured(folder) -> None:
    """The first look is at the first selection, wherever the full steps of the beginning end."""
    with start(folder, {**SPARSE, "first_full": None}, speculative_config=None) as llm:
        llm.generate([LONG[0]], replace(GREEDY, max_tokens=7))
        report = llm.speculation_report().context
    assert (report.full_steps, report.sparse_steps) == (4, 2)
    assert 0.1 < report.captured <= 1
