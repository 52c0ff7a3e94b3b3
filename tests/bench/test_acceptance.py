"""Acceptance by kind of task: what is counted, its intervals, and a run on a tiny target."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from distilling import tiny_target
from outrider import LLM
from outrider.bench import acceptance
from outrider.bench.acceptance import acceptance_length, accepted_per_draft, gain, interval, tokens_per_step
from outrider.errors import ConfigError

FILE = Path(__file__).parents[2] / "scripts" / "acceptance.py"


def script():
    spec = spec_from_file_location("acceptance_script", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path):
    """Three files of evaluation prompts in their public forms."""
    turns = [
        {"id": i, "task": task, "turns": ["abab" * (i + 1), "more"]} for i in range(2) for task in ("multi_turn", "qa")
    ]
    files = {
        "spec_bench": turns,
        "gsm8k_test": [{"question": "one and one", "answer": "2"}, {"question": "two and two", "answer": "4"}],
        "humaneval": [{"task_id": "1", "prompt": "def f():\n"}, {"task_id": "2", "prompt": "def g():\n"}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_second_turns_fill_up_what_first_turns_leave(data):
    suites = acceptance.load_suites(data, 3)
    assert list(suites["chat"].openings) == ["abab", "abababab"]
    assert list(suites["chat"].follow_ups) == [("abab", "more")]
    assert len(acceptance.load_suites(data, 1)["chat"].follow_ups) == 0
    assert suites["code"].openings[0].endswith("```python\ndef f():\n```")
    (data / "gsm8k_test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"gsm8k_test\.jsonl cannot be read"):
        acceptance.load_suites(data, 3)


def test_figures_of_counts():
    counts = np.array([[10, 5, 30], [0, 0, 20], [10, 15, 50]])
    assert acceptance_length(counts.sum(axis=0)) == 2.0
    assert tokens_per_step(counts.sum(axis=0)) == 100 / 80
    low, high = interval(acceptance_length, counts)
    assert 1.0 <= low < 2.0 < high <= 2.5


def test_gains_are_paired_by_prompt():
    """Prompts differ tenfold, and still 20 % more on every one of them is a sharp 20 %."""
    rng = np.random.default_rng(0)
    accepted = rng.integers(5, 60, 40) * 5
    old = np.stack([np.full(40, 100), accepted, accepted + 100], axis=1)
    new = old * [1, 1.2, 1]
    change = gain(accepted_per_draft, new.astype(int), old)
    assert change["gain"] == pytest.approx(0.2, abs=1e-3)
    assert change["interval"] == pytest.approx([0.2, 0.2], abs=1e-3)
    low, high = interval(accepted_per_draft, old)
    assert high - low > 0.2


def test_a_run_measures_every_way_and_compares_them(data, capsys):
    ways = script().ways_of({}, 4)
    assert list(ways) == ["ngram", "suffix", "vote"]
    with LLM(tiny_target(), speculative_config=None, max_model_len=256, prefix_caching=False) as llm:
        found = acceptance.measure(llm, ways, acceptance.load_suites(data, 3), max_tokens=40, concurrency=2)
        prompts = [[{"role": "user", "content": "abab"}]]
        cost = acceptance.token_cost(llm, ways["ngram"], prompts, repeats=2)
    rows = acceptance.rows(found)
    assert [(row["way"], row["task"], row["prompts"]) for row in rows[:4]] == [
        ("ngram", "chat", 3),
        ("ngram", "maths", 2),
        ("ngram", "code", 2),
        ("ngram", "mixed", 7),
    ]
    assert all(row["num_drafts"] > 0 for row in rows if row["task"] == "mixed")
    assert all(a <= row["acceptance_length"] <= b for row in rows for a, b in [row["acceptance_length_interval"]])
    compared = script().comparisons(found, [])
    assert len(compared) == 1
    assert "vote over" in next(iter(compared))
    assert 0 < cost["share"] == pytest.approx(cost["token_ms"] / cost["step_ms"], rel=1.0)
    script().show({"rows": rows, "comparisons": compared, "cost": {"ngram": cost}})
    assert "a step" in capsys.readouterr().out


def test_specialists_are_compared_in_their_own_domain():
    counts = np.array([[10, 10, 20], [10, 20, 30]])
    better = counts + np.array([0, 5, 0])
    found = {way: {"maths": c, "mixed": c} for way, c in (("generalist", counts), ("maths", better), ("vote", counts))}
    compared = script().comparisons(found, ["generalist", "maths"])
    assert compared["maths over generalist, maths, accepted per draft"]["gain"] == pytest.approx(1 / 3, abs=1e-3)
