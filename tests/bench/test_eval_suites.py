"""Suites from end to end, answered by stubs that see all, or only the end of a prompt."""

import pytest

from counting import count
from outrider.bench.eval import SUITES, Answer, Reads, evaluate, make_cases, summarise
from outrider.errors import ConfigError

ROWS = '{"question": "who did %d", "answers": ["Person%d"], "ctxs": [{"title": "T%d", "text": "Deed of Person%d ."}]}'


@pytest.fixture
def folder(tmp_path):
    prose = "\n\n".join(f"Paragraph {i} tells of a walk in the hills, and of rain and of snow." for i in range(200))
    (tmp_path / "war_and_peace.txt").write_text(prose)
    (tmp_path / "nq_open_oracle.jsonl").write_text("\n".join(ROWS % (i, i, i, i) for i in range(200)))
    return tmp_path


def ask(case, reads):
    """Finds every answer that stands in the part of the prompt it reads."""
    seen = case.prompt if reads is None else case.prompt[-4 * reads.budget :]
    said = [group[0] for group in case.answers if group[0] in seen]
    return Answer(" ".join(said), tuple(len(word) for word in said))


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_suite_is_solved_by_reading_all_and_not_by_reading_the_end(suite, folder):
    cases = make_cases(suite, folder, [500, 900], 3, count)
    assert len(cases) == 6
    assert all(0.7 * case.facts["length"] < count(case.prompt) <= case.facts["length"] for case in cases)
    means = summarise(evaluate(cases, ask, [Reads(40), Reads(100_000)]))
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


def test_all_ways_of_a_case_follow_each_other_and_are_told_apart():
    asked = []

    def note(case, reads):
        asked.append((case.facts["depth"], reads and reads.label))
        return ask(case, reads)

    ways = [Reads(40, "pages"), Reads(40, "window")]
    rows = evaluate(make_cases("key_value", None, [500], 2, count), note, ways)
    names = [None, "pages 40", "window 40"]
    assert asked == [(depth, name) for depth in (0.05, 0.95) for name in names]
    assert [row["reads"] for row in rows] == 2 * ["full", "pages 40", "window 40"]
    assert [row["selector"] for row in rows if row["reads"] != "full"] == 2 * ["pages", "window"]
    assert len(summarise(rows)) == 3
