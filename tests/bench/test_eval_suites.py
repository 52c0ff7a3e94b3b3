"""Suites from end to end, answered by stubs that see all, or only the end of a prompt."""

import pytest

from outrider.bench.eval import SUITES, Answer, evaluate, make_cases, summarise
from outrider.errors import ConfigError

ROWS = '{"question": "who did %d", "answers": ["Person%d"], "ctxs": [{"title": "T%d", "text": "Deed of Person%d ."}]}'


def count(text):
    return len(text.replace("-", " - ").replace('"', ' " ').split()) + text.count(".") + text.count("\n")


@pytest.fixture
def folder(tmp_path):
    prose = "\n\n".join(f"Paragraph {i} tells of a walk in the hills, and of rain and of snow." for i in range(200))
    (tmp_path / "war_and_peace.txt").write_text(prose)
    (tmp_path / "nq_open_oracle.jsonl").write_text("\n".join(ROWS % (i, i, i, i) for i in range(200)))
    return tmp_path


def ask(cases, budget):
    """Finds every answer that stands in the part of the prompt it reads."""
    answers = []
    for case in cases:
        seen = case.prompt if budget is None else case.prompt[-4 * budget :]
        said = [group[0] for group in case.answers if group[0] in seen]
        answers.append(Answer(" ".join(said), tuple(len(word) for word in said)))
    return answers


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_suite_is_solved_by_reading_all_and_not_by_reading_the_end(suite, folder):
    cases = make_cases(suite, folder, [500, 900], 3, count)
    assert len(cases) == 6
    assert all(0.7 * case.facts["length"] < count(case.prompt) <= case.facts["length"] for case in cases)
    means = summarise(evaluate(cases, ask, [40, 100_000]))
    scores = {(row["length"], row["reads"]): row for row in means}
    for length in (500, 900):
        assert scores[length, "full"]["score"] == 1
        assert scores[length, "100000"]["points_lost"] == 0
        assert scores[length, "40"]["score"] < 0.6
        assert scores[length, "40"]["points_lost"] == pytest.approx(100 * (1 - scores[length, "40"]["score"]))
        assert scores[length, "40"]["equal"] < 1 == scores[length, "100000"]["equal"]


def test_missing_data_and_unknown_suites_say_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="OUTRIDER_DATA"):
        make_cases("needle_single", None, [500], 1, count)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_cases("multi_document", tmp_path, [500], 1, count)
    with pytest.raises(ConfigError, match="did you mean 'key_value'"):
        make_cases("keyvalue", None, [500], 1, count)
    assert make_cases("key_value", None, [500], 2, count)
