"""Layers that move between memory and the slow tier, as the plan asks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import tiering
from contexts import GREEDY, LONG
from outrider.errors import CapacityError, ConfigError, UnsupportedError
from tiering import SPARSE, answers, mode, need, slow, start, tiers, watch

folder, resident = tiering.folder, tiering.resident


# --- layers that move, and the plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparse", "full"])
def test_layers_go_down_when_they_must_and_come_back(folder, resident, tmp_path, name) -> None:
    """Tokens stay, use stays below the limit at every step, and the plan is what is used."""
    expected = resident(mode(name))
    limit = need(folder, 330)
    context = {**mode(name), "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16, max_model_len=200) as llm:
        place = llm.core.place
        seen = watch(llm, lambda: (place.slow_layers, place.used(), place.plan().fast_bytes))
        assert answers(llm) == expected
        assert max(slow for slow, _, _ in seen) > 0 == seen[0][0]
        assert max(used for _, used, _ in seen) <= limit
        assert all(used <= planned * 1.05 for _, used, planned in seen)
        assert tiers(llm).loaded_bytes > 0
        seen.clear()
        assert answers(llm, LONG[2:3], replace(GREEDY, max_tokens=80))[0][:40] == expected[2]
        assert seen[-1][0] == 0, "a short request alone has room; its layers come back"
        assert tiers(llm).moved_layers >= 2
        assert answers(llm) == expected


def test_the_last_layer_that_comes_back_leaves_no_staging(folder, resident, tmp_path) -> None:
    """Layers come back while requests run that need nearly all the room: what was staged goes first."""
    limit = need(folder, 400)
    context = {**mode("full"), "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16, max_model_len=200) as llm:
        place = llm.core.place
        seen = watch(llm, lambda: (place.slow_layers, place.used()))
        assert answers(llm) == answers(llm) == resident(mode("full"))
        assert any(before > after == 0 for (before, _), (after, _) in pairwise(seen))
        assert max(used for _, used in seen) <= limit


def test_nothing_moves_while_everything_fits(folder, resident, tmp_path) -> None:
    context = {**SPARSE, "kv_path": str(tmp_path), "kv_memory": 1 << 28}
    with start(folder, context) as llm:
        assert answers(llm) == resident(SPARSE)
        assert (tiers(llm).moved_layers, tiers(llm).loaded_bytes, tiers(llm).stored_bytes) == (0, 0, 0)
        assert llm.core.place.tier.held == 0


def test_admission_waits_for_the_plan(folder, resident, tmp_path) -> None:
    """More requests than the buffers have room for: they come one after the other."""
    limit = need(folder, 150)
    context = {**SPARSE, "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16) as llm:
        engine, place = llm.core.engine, llm.core.place
        seen = watch(llm, lambda: (len(engine.scheduler.running), place.used()))
        assert answers(llm) == resident(SPARSE)
        assert 1 <= max(running for running, _ in seen) < 4
        assert max(used for _, used in seen) <= limit
        assert tiers(llm).slow_layers > 0


def test_what_can_never_fit_is_refused(folder, tmp_path) -> None:
    """By name at the start, or the context is lowered and a longer prompt refused."""
    context = {**SPARSE, "kv_path": str(tmp_path)}
    with pytest.raises(CapacityError, match="buffers of one request"):
        start(folder, {**context, "kv_memory": 1000})
    small = {**context, "kv_memory": need(folder, 150)}
    with pytest.raises(CapacityError, match="less than max_model_len = 512"):
        start(folder, {**small, "slow_layers": 0}, max_model_len=512)
    with start(folder, {**small, "slow_layers": 0}) as llm:
        assert 100 < llm.core.resolved.max_model_len < 160


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({**SPARSE, "kv_memory": 1 << 20}, "kv_memory needs kv_path"),
        ({**SPARSE, "window": 3, "kv_path": "here"}, "use 4 or more"),
        ({**SPARSE, "kv_path": "/proc/nowhere"}, "cannot be used"),
        ({**SPARSE, "kv_path": "here", "slow_kv_dtype": "bfloat16", "kv": "int8"}, "cannot be kept as bfloat16"),
        ({**SPARSE, "kv_path": "here", "backend": "reference"}, "reference decoder"),
        ({**SPARSE, "keep_prompts": 10}, "keep_prompts needs kv_path"),
        ({**SPARSE, "slow_layers": 2}, "slow_layers needs kv_path"),
        ({**SPARSE, "slow_kv_dtype": "int8"}, "slow_kv_dtype needs kv_path"),
        ({**SPARSE, "prefetch": 0}, "prefetch needs kv_path"),
        ({**SPARSE, "elastic": False}, "elastic needs kv_path"),
        ({**SPARSE, "kv_path": ""}, "name a folder"),
        ({**SPARSE, "kv_path": "a\0b"}, "name a folder"),
        ({**SPARSE, "kv_path": "here", "slow_layers": 5}, "use 0 to 4"),
        ({**SPARSE, "min_captured": 1.1}, "from 0 to 1"),
        ({**SPARSE, "min_captured": float("nan")}, "from 0 to 1"),
        ({**SPARSE, "sticky": float("nan")}, "use 0 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(folder, tmp_path, context, words) -> None:
    context = dict(context)
    options = {name: context.pop(name) for name in ("backend",) if name in context}
    if "kv" in context:
        options["kv_cache_dtype"] = context.pop("kv")
    if context.get("kv_path") == "here":
        context["kv_path"] = str(tmp_path)
    with pytest.raises(ConfigError, match=words):
        start(folder, context, **options)


def test_sliding_windows_are_refused(tmp_path) -> None:
    from outrider.config import ContextConfig
    from outrider.memory.place.build import check_tiers
    from outrider.memory.shapes import SHAPES

    spec = replace(SHAPES["mistral-7b"], sliding_window=4096)
    with pytest.raises(ConfigError, match="sliding window"):
        check_tiers(ContextConfig(kv_path=str(tmp_path)), spec, 16)


def test_a_requests_budget_is_what_the_buffers_hold(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        with pytest.raises(UnsupportedError, match="use 24 or less"):
            llm.generate(LONG[:1], replace(GREEDY, extra_args={"context_budget": 25}))
        smaller = llm.generate(LONG[:1], replace(GREEDY, extra_args={"context_budget": 16}))[0]
        assert smaller.metrics.context.budget == 16


def test_where_nothing_moves_a_request_may_read_more_than_the_configuration_says(folder, tmp_path) -> None:
    larger = replace(GREEDY, extra_args={"context_budget": 60})
    with start(folder, {**SPARSE, "kv_path": str(tmp_path), "keep_prompts": 16}) as llm:
        output = llm.generate(LONG[:1], larger)[0]
    with start(folder, {**SPARSE, "budget": 60}) as llm:
        assert output.outputs[0].token_ids == llm.generate(LONG[:1], GREEDY)[0].outputs[0].token_ids
    assert output.metrics.context.budget == 60


def test_the_way_of_reading_can_be_changed_while_idle(folder, resident, tmp_path) -> None:
    """Cached prompts stay, in the tier too; limits move layers."""
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        for context in (SPARSE, mode("full"), {**SPARSE, "group": 1, "budget": 32}, mode("lossless")):
            llm.set_context_config({**context, "slow_layers": 2})
            outputs = llm.generate(LONG, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == resident(context)
            assert tiers(llm).slow_layers == 2
        assert all(output.metrics.cached_tokens > 0 for output in outputs)
        llm.set_context_config({**SPARSE, "slow_layers": 0})
        assert answers(llm) == resident(SPARSE)
        assert tiers(llm).slow_layers == 0
        with pytest.raises(ConfigError, match="make a new LLM"):
            llm.set_context_config({**SPARSE, "kv_path": str(tmp_path / "elsewhere")})


def test_a_refused_way_of_reading_leaves_the_old_one(folder, resident, tmp_path) -> None:
    """What a start would refuse, and what only a start can give."""
    refused = {
        "use 0 to 4": {"slow_layers": 99},
        "cannot hold the buffers of one request": {"kv_memory": 1},
        "this machine has": {"kv_memory": 10**18},
        "kv_path cannot be changed": {"kv_path": "/proc/nowhere"},
        "slow_kv_dtype cannot be changed": {"slow_kv_dtype": "int8"},
        "keep_prompts cannot be changed": {"keep_prompts": 5},
    }
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        rules = llm.core.place.rules
        for words, change in refused.items():
            with pytest.raises((CapacityError, ConfigError), match=words):
                llm.set_context_config({**SPARSE, **change})
            assert llm.core.place.rules == rules
        assert answers(llm) == resident(SPARSE)
        assert tiers(llm).slow_layers == 3


def test_buffers_are_no_longer_than_a_context(folder, resident, tmp_path) -> None:
    """A budget beyond every context takes no memory that nobody can use."""
    with start(folder, slow(tmp_path, {**SPARSE, "budget": 10**12})) as llm:
        assert llm.core.place.shape.capacity == 512 + 4
        assert answers(llm) == resident(mode("full"))
        assert answers(llm) == resident(mode("full"))
        assert tiers(llm).loaded_bytes > 0, "a hit reads what the cold run wrote"
