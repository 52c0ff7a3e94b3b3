"""Evaluation tasks: prompts of the right length with the answer in the right place, and honest scores."""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from counting import count
from outrider.bench.eval_cases import Case, fill, insert, normalise, paragraphs, spread
from outrider.bench.eval_measures import agreement, captured_by_layer, overlap
from outrider.bench.eval_needles import needle_late, needle_multi, needle_single, variable_tracking
from outrider.bench.eval_plots import plot_depths, plot_lines, plot_moved, plot_timeline, series
from outrider.bench.eval_retrieval import key_value_retrieval, multi_document_qa
from outrider.errors import ConfigError

FILLER = paragraphs(
    "\n\n".join(f"Paragraph {i} tells of a long walk through the hills, and of rain." for i in range(60))
)


def where(case, text):
    """Depth at which a text stands in a prompt; it stands there once."""
    assert case.prompt.count(text) == 1
    return case.prompt.index(text) / len(case.prompt)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [300, 900])
def test_a_needle_stands_at_its_depth_in_a_prompt_of_its_length(depth, length):
    case = needle_single(FILLER, length, depth, count, seed=3)
    assert 0.85 * length < count(case.prompt) <= length
    number = case.answers[0][0]
    assert abs(where(case, number) - depth) < 0.25
    assert case.score(f"It is {number}, I think.") == 1
    assert case.score("It is 1234567.") == 0
    assert case.score(f"It is {number}9.") == 0
    assert needle_single(FILLER, length, depth, count, seed=3) == case
    assert needle_single(FILLER, length, depth, count, seed=4).answers != case.answers


def test_several_needles_score_by_share():
    case = needle_multi(FILLER, 900, 4, count, seed=1)
    numbers = [group[0] for group in case.answers]
    depths = [where(case, number) for number in numbers]
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.6
    assert case.score(" and ".join(numbers[:3])) == 0.75


def test_the_late_needle_has_rivals_and_is_asked_for_at_the_end():
    case = needle_late(FILLER, 900, 0.5, count, seed=2)
    assert case.prompt.count("magic numbers for") == 3
    assert case.prompt.index("Monday") > 0.9 * len(case.prompt)
    assert len(case.answers) == 1


def test_variable_chains_are_complete():
    case = variable_tracking(FILLER, 900, 4, count, seed=5)
    names = [group[0] for group in case.answers]
    assert len(names) == 5
    for old, new in pairwise(names):
        where(case, f"VAR {new} = VAR {old}.")
    assert case.score(", ".join(names)) == 1
    assert case.score(names[0]) == 0.2


@pytest.mark.parametrize("depth", [0.0, 0.5, 0.99])
def test_key_value_pairs_fill_the_length(depth):
    case = key_value_retrieval(None, 3000, depth, count, seed=1)
    assert 0.85 * 3000 < count(case.prompt) <= 3000
    body = case.prompt[case.prompt.index("{") : case.prompt.rindex("}") + 1]
    pairs = json.loads(body)
    assert len(pairs) == case.facts["pairs"]
    value = case.answers[0][0]
    key = next(k for k, v in pairs.items() if v == value)
    assert abs(list(pairs).index(key) / len(pairs) - depth) < 0.05
    assert case.prompt.endswith(f'Key: "{key}"\nCorresponding value:')
    assert case.score(f' "{value}"') == 1
    assert case.score(value[:-1]) == 0


def rows(number):
    return [{"question": f"who did deed {i}", "answers": [f"Person{i} Smith", f"P{i}"],
             "ctxs": [{"title": f"Deed {i}", "text": f"Deed {i} was done by Person{i} Smith long ago."}]}
            for i in range(number)]  # fmt: skip


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_documents_surround_the_one_that_answers(depth):
    case = multi_document_qa(rows(40), 7, 400, depth, count, seed=2)
    assert count(case.prompt) <= 400
    place = case.prompt[: case.prompt.index("(Title: Deed 7)")].count("Document [")
    assert abs((place - 1) / (case.facts["documents"] - 1) - depth) < 0.1
    assert case.score("It was person7 smith.") == 1
    assert case.score("It was p7!") == 1
    assert case.score("Person77 Smith") == 0


def test_documents_that_answer_by_chance_are_left_out():
    data = rows(10)
    data[3]["ctxs"][0]["text"] += " Person7 Smith watched."
    assert "watched" not in multi_document_qa(data, 7, 4000, 0.5, count).prompt


def test_scores_do_not_depend_on_case_articles_and_marks():
    assert normalise("The  Queen's, a 12-year reign!") == "queen s 12-year reign"
    assert Case("t", "", (("May 18, 2018",),), 8).score("on may 18 2018.") == 1


def test_fill_and_insert():
    assert fill(["aa " * 3, "bb"], 20, lambda text: len(text.split())) == ["aa " * 3, "bb", "aa " * 3, "bb"]
    assert insert(["a", "b"], [(1.0, "z"), (0.0, "x"), (0.5, "y")]) == ["x", "a", "y", "b", "z"]
    assert spread(3) == [0, 0.5, 1]
    assert spread(1) == [0.5]
    with pytest.raises(ConfigError):
        fill([], 10, count)


def test_measures():
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == {"equal": 0.75, "prefix": 0.5}
    assert agreement([1, 2], [1, 2, 3]) == pytest.approx({"equal": 2 / 3, "prefix": 2 / 3})
    assert agreement([], []) == {"equal": 1, "prefix": 1}
    last, now = np.array([[[1, 2, 3, 4]]]), np.array([[[1, 2, 3, 9]]])
    assert overlap(last, now) == 0.75


def test_everything_captures_everything_in_every_layer():
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(3, 4, 8)), rng.normal(size=(3, 10, 2, 8))
    every = np.broadcast_to(np.arange(9), (2, 2, 9))
    shares = captured_by_layer(queries, keys, every, np.array([0, 0, 1]))
    assert shares == pytest.approx([1, 1, 1], abs=1e-6)
    assert (captured_by_layer(queries, keys, every[:, :, :3], np.array([0, 0, 1])) < 1).all()


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    data = [{"budget": b, "mode": m, "score": b / 1024, "length": b, "depth": 0.5} for b in (256, 512) for m in "ab"]
    assert series(data, "budget", "score", "mode") == {"a": [(256, 0.25), (512, 0.5)], "b": [(256, 0.25), (512, 0.5)]}
    plot_lines(data, "budget", "score", "mode", tmp_path / "lines.png", "t", ("budget", "accuracy"))
    plot_depths(data, tmp_path / "depths.png", "t")
    plot_moved({"fresh": [3, 4], "sticky": [1, 1]}, 10, tmp_path / "moved.png")
    plot_timeline([("load", 1, 0.0, 0.01), ("compute", 0, 0.0, 0.02)], tmp_path / "deep" / "timeline.svg")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("lines.png", "depths.png", "moved.png"))
    assert (tmp_path / "deep" / "timeline.svg").read_text().startswith("<?xml")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_moved({"a": [1]}, 1, tmp_path / "x.nothing")


@pytest.mark.skipif("OUTRIDER_DATA" not in os.environ, reason="OUTRIDER_DATA names no folder")
def test_the_public_data_makes_cases():
    folder = Path(os.environ["OUTRIDER_DATA"])
    questions = [json.loads(line) for line in (folder / "nq_open_oracle.jsonl").read_text().splitlines()]
    case = multi_document_qa(questions, 5, 4000, 0.5, count)
    assert case.facts["documents"] > 15
    record = json.loads((folder / "kv_retrieval_75.jsonl").read_text().splitlines()[0])
    pairs = [tuple(pair) for pair in record["ordered_kv_records"]]
    assert key_value_retrieval(pairs, 2000, 0.5, count).answers
    prose = paragraphs((folder / "war_and_peace.txt").read_text())
    assert len(prose) > 5000
    assert count(needle_single(prose, 4000, 0.3, count).prompt) > 3400
