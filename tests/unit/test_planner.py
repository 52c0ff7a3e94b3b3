"""The memory plan against the published formulas, by hand and by search."""

import json

import pytest

from outrider.errors import ConfigError
from outrider.memory.planner import (
    Footprint,
    Load,
    count_parameters,
    fit_layers,
    footprint,
    longest_context,
    most_requests,
    plan,
    selector_token_bytes,
    shortage,
    thresholds,
    token_bytes,
)
from outrider.memory.shapes import SHAPES

GIB = 2**30
LLAMA = SHAPES["llama3-8b"]
PAPER = footprint(LLAMA, 2 * count_parameters(LLAMA))
#: Nothing resident but KV: one byte per token, layer and tier makes sums easy to read.
PLAIN = Footprint(weight_bytes=0, layers=4, kv_bytes=1, slow_kv_bytes=1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("qwen2.5-7b", 7.6), ("qwen2.5-0.5b", 0.494), ("smollm2-135m", 0.1345),
     ("llama2-7b", 6.74), ("mistral-7b", 7.25), ("llama3.2-1b", 1.236), ("llama3.2-3b", 3.21), ("qwen3-8b", 8.19),
     ("qwen2.5-32b", 32.8), ("qwen2.5-1.5b", 1.54)],
)  # fmt: skip
def test_shapes_have_the_parameters_of_their_model_cards(name, billions):
    assert count_parameters(SHAPES[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_all_resident_is_the_published_formula():
    requests, length, alpha = 4, 16384, 4
    model_bytes = 1.3 * (PAPER.weight_bytes + PAPER.head_bytes)
    kv = 4 * requests * (32 + 1 + alpha) * length * 8 * 128
    assert plan(PAPER, GIB, [Load(length, 2048)] * requests).fast_bytes == pytest.approx(model_bytes + kv, abs=1)


def test_offloaded_is_the_published_formula():
    requests, length, alpha, budget, slow = 4, 16384, 4, 2048, 10
    kv = 4 * requests * ((22 + 1 + alpha) * length + slow * budget) * 8 * 128
    made = plan(PAPER, GIB, [Load(length, budget)] * requests, slow)
    assert made.fast_bytes - made.fixed_bytes == kv
    assert made.slow_bytes == 4 * requests * slow * length * 8 * 128


@pytest.mark.parametrize("slow", [0, 1, 7, 31, 32])
def test_thresholds_are_the_corrected_formula(slow):
    memory, requests, budget, alpha = 80 * GIB, 32, 2048, 4
    unit = 4 * requests * 8 * 128
    free = memory - PAPER.fixed_bytes
    expected = (free - unit * slow * budget) // (unit * (32 + 1 + alpha - slow))
    assert longest_context(PAPER, memory, requests, budget, slow) == expected
    without_the_four = (free - unit // 4 * slow * budget) // (unit * (32 + 1 + alpha - slow))
    assert slow == 0 or without_the_four > expected


def test_kv_is_counted_per_kv_head():
    assert token_bytes("bfloat16", 8, 128) == 2 * 8 * 128 * 2
    assert token_bytes("int8", 8, 128) == 2 * 8 * (128 + 4)
    assert footprint(LLAMA, 0).kv_bytes == token_bytes("bfloat16", 8, 128)
    with pytest.raises(ConfigError, match="float32, bfloat16, int8"):
        token_bytes("fp4", 8, 128)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (32, 1)])
def test_mha_gqa_and_mqa_differ_by_their_kv_heads(heads, kv_heads):
    from dataclasses import replace

    spec = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads)
    assert footprint(spec, 0).kv_bytes == 2 * kv_heads * 128 * 2
    assert selector_token_bytes(spec, "published") == 4 * (1 + heads // kv_heads) * kv_heads * 128
    assert selector_token_bytes(spec, "head") == 2 * kv_heads * 128 + 4 * spec.hidden_size // 16
    assert selector_token_bytes(spec, "pages") == 2 * 2 * 8 * kv_heads * 128 // 16
    assert selector_token_bytes(spec, "pages", group=6, taps=0) == 2 * 2 * spec.num_layers * kv_heads * 128 // 16
    assert selector_token_bytes(spec, "pages", group=6, taps=1) == 2 * 2 * 6 * kv_heads * 128 // 16
    assert selector_token_bytes(spec, "window") == 0


def test_requests_of_different_lengths_and_budgets_are_summed():
    made = plan(PLAIN, 100, [Load(10, 4), Load(20, 8), Load(2, 8)], 1)
    assert made.resident_bytes == 3 * 32
    assert made.buffer_bytes == 4 + 8 + 2  # a short request needs no more buffer than it has tokens
    assert made.slow_bytes == 32


def test_pages_round_up():
    paged = Footprint(weight_bytes=0, layers=1, kv_bytes=1, slow_kv_bytes=1, page_size=16)
    assert plan(paged, 100, [Load(17, 100)]).resident_bytes == 32
    assert longest_context(paged, 47, 1, 16, 0) == 32


def test_offloading_short_requests_gains_nothing():
    loads = [Load(8, 100)] * 2
    assert len({plan(PLAIN, 100, loads, i).fast_bytes for i in range(5)}) == 1
    assert fit_layers(PLAIN, 63, loads) is None
    assert thresholds(PLAIN, 63, 2, 100) == [7] * 5


def test_where_no_placement_fits_it_is_said_what_would_help():
    loads = [Load(30, 5), Load(60, 7)]
    assert fit_layers(PLAIN, 47, loads) is None
    assert "lower the budget, the number of requests or their length" in shortage(PLAIN, 47, loads, None)


def test_a_small_slow_tier_limits_too():
    assert not plan(PLAIN, 20, [Load(10, 5)], 4, slow_limit=39).fits
    assert fit_layers(PLAIN, 35, [Load(10, 5)], slow_limit=9) is None
    assert "slow tier" in shortage(PLAIN, 35, [Load(10, 5)], 9)
    assert fit_layers(PLAIN, 35, [Load(10, 5)], slow_limit=10) == 1


def test_the_most_requests_follow_the_plan():
    assert most_requests(PLAIN, 60, Load(10, 5)) == 3
    assert most_requests(PLAIN, 19, Load(10, 5)) == 0


@pytest.mark.parametrize("staging", [0, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_thresholds_are_the_edge_of_what_fits(staging, page_size):
    model = Footprint(1000, 6, 8, 4, selector_bytes=3, staging_layers=staging, page_size=page_size)
    for slow in range(7):
        longest = longest_context(model, 20_000, 3, 32, slow)
        assert longest is not None
        assert plan(model, 20_000, [Load(longest, 32)] * 3, slow).fits
        assert not plan(model, 20_000, [Load(longest + page_size, 32)] * 3, slow).fits


def test_a_bounded_slow_tier_bounds_a_context_that_nothing_else_does():
    assert longest_context(PLAIN, 100, 1, 5, 4) is None
    assert longest_context(PLAIN, 100, 1, 5, 4, slow_limit=1000) == 250


def test_bad_numbers_are_refused():
    with pytest.raises(ConfigError, match="budget"):
        longest_context(PLAIN, 100, 1, 0, 0)
    with pytest.raises(ConfigError, match="slow_layers"):
        plan(PLAIN, 100, [], 5)


class TestCommand:
    """The command, driven as a user does."""

    @pytest.fixture
    def run(self):
        typer = pytest.importorskip("typer.testing")
        from typer import Typer

        from outrider.cli.plan import plan_command

        app = Typer()
        app.command()(plan_command)
        return lambda *words: typer.CliRunner().invoke(app, list(words))

    def test_text(self, run):
        shown = run("llama3-8b", "--memory", "80GiB", "--requests", "32", "--budget", "2048")
        assert shown.exit_code == 0
        assert "layers in the slow tier" in shown.output
        assert "does not fit" in shown.output  # 32 requests of the full 131072 tokens

    def test_json_and_plot(self, run, tmp_path):
        pytest.importorskip("matplotlib")
        chart = tmp_path / "chart.png"
        shown = run("qwen2.5-7b", "--memory", "24GB", "--length", "8192", "--json", "--plot", str(chart))
        report = json.loads(shown.output)
        assert report["slow_layers"] == 0
        assert report["fast_bytes"] == sum(report["parts"].values())
        assert chart.read_bytes().startswith(b"\x89PNG")

    def test_a_config_json(self, run, tmp_path):
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
                  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "intermediate_size": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
                  "tie_word_embeddings": True}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in (tmp_path, tmp_path / "config.json"):
            report = json.loads(run(str(name), "--memory", "1GiB", "--json").output)
            assert report["layers"] == 3
            assert report["length"] == 2048

    @pytest.mark.parametrize(
        ("words", "hint"),
        [(["llama3-8b", "--memory", "lots"], "80GiB"), (["llama9", "--memory", "1GiB"], "llama3-8b"),
         (["llama3-8b", "--memory", "1GiB", "--weights", "int3"], "int8"),
         (["llama3-8b", "--memory", "1GiB", "--selector", "best"], "unknown option"),
         (["llama3-8b", "--memory", "1GiB", "--kv-type", "int3"], "float32")],
    )  # fmt: skip
    def test_mistakes_name_the_fix(self, run, words, hint):
        shown = run(*words)
        assert shown.exit_code != 0
        assert hint in str(shown.exception)
