"""Benchmarks: records, prompts, turns, ratios, and a speed run on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.bench import lossless, speed
from outrider.bench.ablation import ablation_modes, ablation_rows
from outrider.bench.page import write_page
from outrider.bench.peers.compare import Shape, compare
from outrider.bench.peers.peer import PEERS, Timing, opener
from outrider.bench.record import SCHEMA, emit, new_record, percentile
from outrider.bench.roofline import read_bandwidth
from outrider.bench.workloads import OWN, interleave, load_prompts, read_prompts
from outrider.errors import ConfigError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    folder = repeating_folder(tmp_path_factory.mktemp("tiny") / "model", positions=1024)
    with LLM(folder, speculative_config=None, max_num_seqs=4, backend="compiled") as llm:
        yield llm


def test_a_record_says_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit(new_record("speed", {"a": 1}, [{"mode": "plain"}]), tmp_path / "out.json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "out.json").read_text())
    assert (last["schema"], last["kind"], last["rows"]) == (SCHEMA, "speed", [{"mode": "plain"}])
    assert last["hardware"]["cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_prompts_are_mixed_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    prompts = load_prompts(None, ["qa", "rag"], 1)
    assert [prompt.task for prompt in prompts] == ["qa", "rag"]
    assert len({prompt.task for prompt in read_prompts(OWN)}) == 7
    assert interleave([["a", "b", "c"], ["x"]]) == ["a", "x", "b", "c"]
    with pytest.raises(ConfigError, match="qa"):
        load_prompts(None, ["q"], None)
    with pytest.raises(ConfigError, match="does not exist"):
        load_prompts(str(tmp_path / "nowhere"), None, None)
    with pytest.raises(ConfigError, match=r"spec_bench\.jsonl"):
        load_prompts(str(tmp_path), None, None)


class Steady:
    """A peer of a fixed speed."""

    version, settings = "1", {}

    def __init__(self, name: str, per_token: float) -> None:
        self.name, self._per_token, self.calls = name, per_token, 0

    def run(self, prompts, count) -> Timing:
        self.calls += 1
        tokens = len(prompts) * (count - 1)
        return Timing(sum(map(len, prompts)) * self._per_token, max(1, tokens) * self._per_token, tokens)

    def close(self) -> None:
        """Nothing is open."""


def test_peers_are_compared_in_turns() -> None:
    ours, theirs = Steady("ours", 0.5), Steady("theirs", 1.0)
    rows = compare([ours, theirs], [Shape("decode", [[1, 2, 3]], 9), Shape("prefill 8", [[1] * 8], 1)], repeats=3)
    assert [row["ours_over_it"] for row in rows] == [1.0, 2.0, 1.0, 2.0]
    assert [row["tokens_per_second"] for row in rows] == [2.0, 1.0, 2.0, 1.0]
    assert ours.calls == theirs.calls == 2 * (1 + 3)


def test_a_peer_that_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "absent", ("no_such_module", "absent-engine"))
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        opener("llama")
    with pytest.raises(ConfigError, match="pip install absent-engine"):
        opener("absent")


def test_a_speed_run_compares_and_counts(llm: LLM) -> None:
    modes = [speed.Mode.parse(name) for name in ("plain", "ngram", "hedge")]
    prompts = load_prompts(None, ["qa", "math_reasoning"], 2)
    cases = speed.measure(llm, modes, prompts, [4], max_tokens=24, repeats=2, by_task=True)
    rows = speed.rows_of(cases, len(modes))
    assert [(row["task"], row["mode"]) for row in rows] == [
        (task, mode) for task in ("mixed", "qa", "math_reasoning") for mode in ("plain", "ngram", "hedge")
    ]
    assert all(row["identical_to_plain"] for row in rows)
    assert rows[0]["ratio_to_plain"] == 1.0
    assert rows[0]["num_drafts"] == 0
    assert rows[1]["num_draft_tokens"] > rows[1]["num_accepted_tokens"] > 0
    assert rows[1]["acceptance_length"] > 1
    assert min(row["verify_ms"] for row in rows) > 0


def test_an_ablation_tells_every_step_beside_the_papers_figures(llm: LLM, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    modes = ablation_modes(["ngram", "suffix"])
    steps = ["+ vote", "+ length", "+ pipeline"]
    assert [mode.name for mode in modes] == [
        "plain",
        "one: ngram",
        "one: suffix",
        *(f"{step} (published)" for step in steps),
        *(f"{step} (ours)" for step in steps),
        "auto",
    ]
    prompts = load_prompts(None, ["qa", "math_reasoning"], 1)
    cases = speed.measure(llm, modes, prompts, [2], max_tokens=16, repeats=1, by_task=True)
    rows = speed.rows_of(cases, len(modes))
    assert all(row["identical_to_plain"] for row in rows)
    told = {row["mode"]: row for row in ablation_rows(rows)}
    assert list(told) == [mode.name for mode in modes]
    assert told["+ vote (ours)"]["paper_percent"] == "+59.8 / +9.6"
    assert told["plain"]["over_plain"] == 1.0
    assert max(told["one: ngram"]["over_best_single"], told["one: suffix"]["over_best_single"]) == 1.0
    product = told["+ pipeline (ours)"]["over_best_single"]
    for step in steps:
        product /= 1 + told[f"{step} (ours)"]["gain_percent"] / 100
    assert product == pytest.approx(1.0)
    page = tmp_path / "speed.html"
    write_page(page, "Speed <of> it", new_record("speed", {}, rows), cases, ["mode", "task", "acceptance_length"])
    text = page.read_text()
    assert text.count("<svg") == 2 * (len(modes) - 1)  # drafters by task, and how it went over time
    assert "Speed &lt;of&gt; it" in text
    assert "pool level" in text
    assert not re.search(r"(src|href)=.https?:", text)
    both = next(case for case in cases if case.mode == "+ vote (published)").report
    assert both.history
    assert 0 < sum(moment.drafted for moment in both.history) <= both.num_draft_tokens


@pytest.mark.parametrize("word", ["foo=bar", "head="])
def test_a_drafter_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="head=PATH"):
        ablation_modes([word])


def test_a_lossless_run_finds_a_difference(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = load_prompts(None, ["qa"], 2)
    rows = lossless.check(llm, prompts, (3,), (1, 2), params)
    assert [row["different"] for row in rows] == [0] * 4
    real = lossless.answers

    def spoiled(llm, prompts, batch, params):
        tokens, outputs = real(llm, prompts, batch, params)
        return ([[*tokens[0][:-1], -1], *tokens[1:]] if batch == 2 else tokens), outputs

    monkeypatch.setattr(lossless, "answers", spoiled)
    assert sum(row["different"] for row in lossless.check(llm, prompts, (3,), (1, 2), params)) == 2


def test_measured_costs_are_positive_and_leave_the_engine_alone(llm: LLM) -> None:
    before = llm.generate("x", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
    assert 0 < llm.forward_seconds(1) < 1
    assert llm.forward_seconds(16) > 0
    assert llm.generate("x", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids == before
    assert read_bandwidth(1) > 1e8


def test_percentiles() -> None:
    assert percentile([], 50) == 0
    assert percentile([1, 2, 3], 50) == 2
