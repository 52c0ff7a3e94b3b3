"""Simulations from the command line, recorded answers, worst cases and charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.charts import gains_chart, worst_chart
from outrider.bench.recorded import Prices, RecordedWorld, WhatIf
from outrider.bench.simulate import Mode, Simulation, ablation
from outrider.bench.traces import Trace, read_traces, write_traces
from outrider.bench.world import Clock
from outrider.bench.worst import WorstCase, worst_case
from outrider.cli.main import main
from outrider.drafters.base import Context
from outrider.errors import ConfigError
from outrider.speculation.rehearsal import GREEDY
from outrider.types import Draft

LOOP = (3, 1, 4, 1, 5, 9, 2, 6)


def trace(seed: int, tokens: int = 48) -> Trace:
    """An answer that repeats itself for half of its length, and a drafter that is wrong at every fifth token."""
    own = [(37 * i * i + seed) % 900 + 20 for i in range(tokens // 2)]
    output = (*own, *(LOOP * tokens)[: tokens - len(own)])
    guesses = {"small": tuple((token if i % 5 else token + 1, 0.8) for i, token in enumerate(output))}
    return Trace("a" if seed % 2 else "b", (1, 2, 3, seed), output, guesses)


TRACES = [trace(seed) for seed in range(6)]


def test_traces_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_traces(tmp_path / "t.jsonl", TRACES)
    assert read_traces(tmp_path / "t.jsonl") == TRACES
    (tmp_path / "bad.jsonl").write_text('{"task": "a", "prompt": [1]}\n')
    with pytest.raises(ConfigError, match="holds no traces"):
        read_traces(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traces(tmp_path / "none.jsonl")


@pytest.mark.parametrize("pipeline", [False, True])
def test_recorded_answers_come_out_as_recorded(pipeline: bool) -> None:
    world = RecordedWorld(TRACES, what_if={"head": WhatIf(0.5, 0.05)})
    mode = Mode("all", "ours", tuple(world.names()), "hedge", "goodput", 8, pipeline)
    simulation = Simulation(world, mode, 2, 4).run()
    for request, one in enumerate(TRACES):
        assert tuple(simulation._tokens[request]) == (*one.prompt, *one.output)
    told = {drafter.name: drafter for drafter in simulation._speculator.report().drafters}
    assert list(told) == ["ngram", "suffix", "small", "head"]
    assert simulation._speculator.report().num_accepted_tokens > 50


def test_a_recorded_drafter_is_right_until_its_first_mistake_and_reads_the_prompt_once() -> None:
    world, clock = RecordedWorld(TRACES, Prices(model=0.5, catch_up=0.1)), Clock()
    mode = Mode("one", "none", ("small",))
    simulation = Simulation(world, mode, 1, 1).run()
    report = simulation._speculator.report().drafters[0]
    assert 0.7 < report.accepted_tokens / report.draft_tokens < 1.0
    drafter, one = world.drafter("small", clock), world.verify_s(1)
    tokens = list(TRACES[0].prompt)
    (draft,) = drafter.propose([Context(0, tokens, len(tokens), GREEDY)], [2])
    assert clock.now == pytest.approx((2 * 0.5 + 3 * 0.1) * one)
    assert draft.tokens == (TRACES[0].output[0] + 1, TRACES[0].output[1])


def test_the_text_ends_where_the_recorded_one_does() -> None:
    world, output = RecordedWorld(TRACES), TRACES[2].output
    verdict = world.judge(2, len(output) - 2, Draft((*output[-2:], 7)))
    assert verdict.tokens == output[-2:]
    assert verdict.finish is not None


def test_a_drafter_that_cannot_pay_does_not_cost() -> None:
    """Whatever it is like: any acceptance, price and prompt, over 128 tokens, alone or with others of its kind."""
    for cost in (0.01, 0.07, 0.67, 3.0):
        for reading in (0.0, 0.06):
            for acceptance in (0.0, 0.3, 0.6, 0.9):
                assert worst_case(acceptance, cost, reading).ratio_to_plain >= 0.97
    assert worst_case(0.2, 0.2, 0.01, drafters=3).ratio_to_plain >= 0.97
    assert worst_case(0.0, 0.03, 0.0, drafters=3).ratio_to_plain >= 0.97


def test_a_cheap_good_drafter_is_adopted_within_a_few_rounds() -> None:
    assert worst_case(0.9, 0.01, 0.0).ratio_to_plain > 2.5
    assert worst_case(0.8, 0.07, 0.0).ratio_to_plain > 1.5
    assert worst_case(0.8, 0.07, 0.0, tokens=32).ratio_to_plain > 1.3


def test_charts_are_svg_without_outside_assets() -> None:
    pytest.importorskip("matplotlib")
    grid = [WorstCase(a, c, 0.0, 1, 128, 1 + a - c) for a in (0.0, 1.0) for c in (0.1, 0.5)]
    for chart in (worst_chart(grid), gains_chart(ablation(RecordedWorld(TRACES), 2))):
        assert chart.startswith("<svg")
        assert 'href="http' not in chart
        assert "<text" in chart


def test_the_command_simulates_recorded_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "t.jsonl", tmp_path / "gains.svg"
    write_traces(path, TRACES)
    arguments = ["bench", "simulate", "--traces", str(path), "--what-if", "head=0.5,0.05", "--plot", str(plot)]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["kind"] == "simulate"
    alone = [f"+ one drafter: {name}" for name in ("ngram", "suffix", "small", "head")]
    assert [row["step"] for row in record["rows"]][:6] == ["plain", *alone, "+ vote"]
    best = max(row["tokens_per_second"] for row in record["rows"][1:5])
    assert record["rows"][5]["total"] == pytest.approx(record["rows"][5]["tokens_per_second"] / best)
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--what-if", "head=0.5,0.1"], "give --traces"),
        (["--worst", "--traces", "x"], "leave --traces"),
        (["--traces", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("text", ["head", "head=2,0.1", "head=0.5", "=0.5,0.1", "head=a,b"])
def test_an_impossible_drafter_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path / "t.jsonl", TRACES)
    assert main(["bench", "simulate", "--traces", str(tmp_path / "t.jsonl"), "--what-if", text]) == 2
    assert "write it like" in capsys.readouterr().err
