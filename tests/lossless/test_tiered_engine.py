"""Layers in the slow tier, through the whole engine on a tiny model: the tokens are those of resident KV.

K numbers are those of the known failures of sparse and tiered caches (docs/context.md). Every test proves that what
it is about has happened: bytes were loaded, layers moved, transfers were reordered, blocks were lost.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import outrider.memory.place.build as build
import tiering
from contexts import GREEDY, LONG, OPTIONS
from faults import LazyTransfer, ShuffledTransfer
from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from tiering import MODES, SPARSE, answers, check, mode, need, slow, start, tiers

folder, resident = tiering.folder, tiering.resident


# --- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("layers", [1, 4])
def test_slow_layers_change_no_token(folder, resident, tmp_path, name, layers) -> None:
    """Cold, a hit in the prefix cache, and together with others: bitwise resident KV."""
    expected = resident(mode(name))
    with start(folder, slow(tmp_path, mode(name), layers)) as llm:
        assert answers(llm) == expected
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(output.metrics.cached_tokens > 0 for output in outputs)
        assert [answers(llm, [prompt])[0] for prompt in LONG] == expected
        report = tiers(llm)
        assert (report.slow_layers, report.moved_layers) == (layers, layers)
        assert report.loaded_bytes > 0 < report.stored_bytes
        assert report.failures == report.lost_sequences == 0


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_every_kv_type(folder, resident, tmp_path, kv, name) -> None:
    with start(folder, slow(tmp_path, mode(name)), kv_cache_dtype=kv) as llm:
        assert answers(llm) == resident(mode(name), kv_cache_dtype=kv)
        assert tiers(llm).loaded_bytes > 0


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_a_smaller_type_in_the_slow_tier_answers_too(folder, tmp_path, kv) -> None:
    context = slow(tmp_path, SPARSE, slow_kv_dtype="int8")
    with start(folder, context, kv_cache_dtype=kv) as llm:
        assert all(len(answer) == 40 for answer in answers(llm))
        place = llm.core.place
        assert place.tier.block_bytes < place._page_bytes // place.pages.heads


@pytest.mark.parametrize("make", [lambda: ShuffledTransfer(3), LazyTransfer], ids=["shuffled", "lazy"])
@pytest.mark.parametrize("name", ["sparse", "bounded", "full"])
def test_delays_and_reorderings_change_no_token(folder, resident, tmp_path, monkeypatch, make, name) -> None:
    """A copy that nobody waits for is noticed every time."""
    monkeypatch.setattr(build, "Transfer", make)
    with start(folder, slow(tmp_path, mode(name))) as llm:
        assert answers(llm) == resident(mode(name))
        assert answers(llm, params=replace(GREEDY, max_tokens=10)) == [a[:10] for a in resident(mode(name))]
        mover = llm.core.place.mover
        assert mover.account.loads > 20
        assert getattr(mover, "reordered", 1) > 0


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("elastic", [True, False])
def test_look_ahead_and_elastic_loading_change_bytes_and_no_token(folder, resident, tmp_path, ahead, elastic) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm)
        usual = tiers(llm).loaded_bytes
    with start(folder, slow(tmp_path, SPARSE, prefetch=ahead, elastic=elastic)) as llm:
        assert answers(llm) == resident(SPARSE)
        assert (tiers(llm).loaded_bytes > 1.5 * usual) == (not elastic)


def test_chunks_company_and_preemption_change_nothing(folder, resident, tmp_path) -> None:
    """Prompts cut anywhere; a pool so small that sequences take what they have along and put it back."""
    for name in ("sparse", "bounded"):
        expected = resident(mode(name))
        with start(folder, slow(tmp_path, mode(name)), max_num_batched_tokens=9) as llm:
            assert answers(llm) == expected
        pages = -(-max(map(len, LONG)) // 4) + 11 + 24
        with start(folder, slow(tmp_path, mode(name))) as llm:
            per_page = llm.core.resolved.kv_bytes // llm.core.resolved.num_pages
        with start(folder, slow(tmp_path, mode(name)), kv_memory=pages * per_page, max_model_len=pages * 4) as llm:
            assert answers(llm) == expected
            assert llm.core.engine.scheduler.preemptions > 0


DRAFTERS: list[dict[str, Any]] = [
    {"drafters": ["ngram"], "num_speculative_tokens": 5},
    {"drafters": ["ngram", "suffix"], "vote": "hedge", "length": "goodput", "num_speculative_tokens": [0, 8]},
    {"drafters": ["suffix", "ngram"], "vote": "majority", "num_speculative_tokens": 4},
]


@pytest.mark.parametrize("speculation", DRAFTERS)
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_speculation_over_slow_layers(folder, resident, tmp_path, speculation, name) -> None:
    """Rejected drafts leave nothing in buffers or tier; one load per verified block."""
    fixed = isinstance(speculation["num_speculative_tokens"], int)
    expected = resident(mode(name), speculative_config=speculation) if fixed else None
    with start(folder, slow(tmp_path, mode(name)), speculative_config=speculation) as llm:
        said = answers(llm)
        report = llm.speculation_report()
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert report.context.tiers.loaded_bytes > 0
    if name == "full":
        assert said == resident(mode("full"))
    elif expected is not None:
        assert said == expected


def test_the_pipelined_loop(folder, resident, tmp_path) -> None:
    config = {"drafters": ["ngram"], "num_speculative_tokens": 4, "pipeline": True}
    with start(folder, slow(tmp_path, mode("full")), speculative_config=config) as llm:
        assert answers(llm) == resident(mode("full"))
        assert llm.speculation_report().num_accepted_tokens > 0


def test_samples_share_their_prompt(folder, tmp_path) -> None:
    params = replace(GREEDY, temperature=1.0, seed=4, n=3)
    with start(folder, SPARSE) as llm:
        outputs = llm.generate(LONG[:1], params)
        expected = [sample.token_ids for sample in outputs[0].outputs]
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        assert answers(llm, LONG[:1], params) == expected
        assert len({tuple(sample) for sample in expected}) == 3


def test_an_abort_leaves_nothing_behind(folder, resident, tmp_path) -> None:
    with start(folder, slow(tmp_path, mode("bounded"))) as llm:
        for steps in (1, 2, 9):
            stream = llm.stream(LONG[3], GREEDY)
            for _ in range(steps):
                next(stream)
            stream.close()
            check(llm)
        assert answers(llm) == resident(mode("bounded"))


def test_a_budget_that_holds_the_context_is_full_attention(folder, resident, tmp_path) -> None:
    """Over slow layers too, whether the buffers hold everything or it is staged."""
    with start(folder, slow(tmp_path, {**SPARSE, "budget": 200})) as llm:
        assert answers(llm) == resident(mode("full"))
        assert tiers(llm).slow_layers == 3


# --- what is told ----------------------------------------------------------------------------------------------------


def test_every_report_says_what_moved(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        output = llm.generate(LONG[:1], GREEDY)[0]
        seen, report = output.metrics.context, tiers(llm)
        assert 0 < seen.loaded_bytes <= report.loaded_bytes
        assert 0 < seen.stored_bytes <= report.stored_bytes
        assert seen.exposed_wait_s >= 0
        assert output.to_dict()["context"]["loaded_bytes"] == seen.loaded_bytes
        assert "moved" in seen.line()
        plan = llm.memory_plan()
        assert plan["slow_layers"] == 3
        assert plan["kv_slow"] > 0
        assert plan["kv_limit"] == (1 << 28) - (8 << 20), "8 MiB are set aside for transfers"
        assert plan["kv_fast"] <= plan["kv_planned"] * 1.05


def test_the_file_disappears(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm, LONG[:1])
        assert list(tmp_path.glob("outrider-kv-*"))
    gc.collect()
    assert not list(tmp_path.glob("outrider-kv-*"))


def test_the_benchmark_compares_placements(folder, tmp_path) -> None:
    """One table for the ablation, and pictures of what moved."""
    from outrider.bench.context import draw, make_prompts, measure_cells, parse_share, parse_ways
    from outrider.bench.timeline import Timeline

    names = ["resident", "offloaded", "elastic", "tiered", "reread"]
    limit = parse_share("80%", need(folder, 3 * 240))
    assert limit == int(0.8 * need(folder, 720))
    with pytest.raises(ConfigError, match="share like 25%"):
        parse_share("most", 1000)
    with pytest.raises(ConfigError, match="needs a slow tier"):
        parse_ways(["tiered"], [90])
    with start(folder, {"kv_path": str(tmp_path)}, max_num_batched_tokens=16) as llm:
        prompts = make_prompts(llm, None, 3, 220)
        ways = parse_ways(names, [69], limit)
        cells = measure_cells(llm, ways, prompts, 16, 1)
        rows = {cell.way.name: cell.row(cells[0], 220) for cell in cells}
        draw(llm, cells, prompts, tmp_path / "pictures")
        llm.set_context_config(ways[3].config(4))
        with Timeline(llm) as timeline:
            llm.generate(prompts, replace(GREEDY, max_tokens=12))
        events = timeline.last_step()
    assert all(row["identical"] for row in rows.values())
    assert [rows[name]["slow_layers"] for name in names[:3]] == [0, 4, 4]
    assert 0 < rows["tiered"]["slow_layers"] < 4
    assert rows["resident"]["moved_bytes"] == 0 < rows["tiered"]["moved_bytes"]
    assert rows["elastic"]["moved_bytes"] < rows["offloaded"]["moved_bytes"]
    assert rows["tiered"]["moved_bytes"] < rows["reread"]["moved_bytes"]
    assert rows["tiered"]["resident_bytes"] <= limit
    assert {kind for kind, *_ in events} == {"load", "compute"}
    assert all(start < stop for _, _, start, stop in events)
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"moved.png", "timeline.png"}


def test_the_plan_is_told_at_the_start(folder, tmp_path, caplog) -> None:
    with caplog.at_level("INFO"), start(folder, {**SPARSE, "kv_path": str(tmp_path), "kv_memory": 500_000}) as llm:
        assert "in kv_path" in caplog.text
        assert llm.describe()["memory_plan"].startswith("KV in 500000 bytes of fast memory: requests: 1 of ")
    with start(folder) as llm:
        assert llm.describe()["memory_plan"] == "all KV stays in fast memory"


def test_a_killed_process_leaves_a_file_that_the_next_start_removes(folder, tmp_path) -> None:
    """Killed while pages were being written."""
    code = (
        "import os, signal, sys\n"
        "from outrider import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, context_config={slow(tmp_path, SPARSE)!r}, **{OPTIONS!r})\n"
        f"stream = llm.stream({LONG[0]!r}, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))\n"
        "next(stream)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    left = list(tmp_path.glob("outrider-kv-*"))
    assert len(left) == 1
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm, LONG[:1])
        assert not left[0].exists()


@pytest.mark.model
def test_on_the_default_model(tmp_path) -> None:
    """A quarter of the KV in memory: the same tokens, and use that the plan foretold."""
    rng = np.random.default_rng(0)
    text = " ".join(f"House {i} has a {['red', 'green', 'blue'][int(rng.integers(3))]} lamp." for i in range(110))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 1152, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    context: dict[str, Any] = {"mode": "sparse", "budget": 128, "taps": 1}
    with LLM("smollm2-135m", context_config=context, speculative_config=None, **options) as llm:
        expected = llm.generate(text, params)[0].outputs[0].token_ids
        limit = 320 * llm.core.decoder.kv_bytes_per_token()
    tiered = {**context, "kv_memory": limit, "kv_path": str(tmp_path)}
    with LLM("smollm2-135m", context_config=tiered, speculative_config=None, **options) as llm:
        output = llm.generate(text, params)[0]
        assert output.outputs[0].token_ids == expected
        assert output.metrics.context.loaded_bytes > 0
        assert tiers(llm).slow_layers > 20
        plan = llm.memory_plan()
        assert plan["kv_fast"] <= plan["kv_planned"] * 1.05 <= limit * 1.05
