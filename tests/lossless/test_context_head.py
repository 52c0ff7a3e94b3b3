"""Selecting by a retrieval head in the engine, on a tiny model: what must stay bitwise the same, and what is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contexts import GREEDY, LONG, answers, start
from loading import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCABULARY, WIDE, repeating_folder
from outrider.errors import ModelError
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec
from outrider.models.eagle3_files import save_head

DRAFTS = {"drafters": ["ngram", "suffix"], "vote": "hedge", "num_speculative_tokens": 4}


def write_head(folder: Path, **changes: Any) -> str:
    """A random head of the tiny model, trained (it says) on 64 positions."""
    torch.manual_seed(3)
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "draft_vocab_size": 64, "num_heads": HEADS}
    shape |= {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": WIDE, "taps": (0, 1, 1)}
    head = Eagle3Head(Eagle3Spec(**{**shape, "max_positions": 64, **changes}))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_head(head, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("head") / "model")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    selector = {"name": "head", "path": write_head(tmp_path_factory.mktemp("eagle"))}
    return {"mode": "sparse", "budget": 24, "sinks": 2, "window": 4, "selector": selector}


@pytest.fixture(scope="module")
def full(folder: str) -> list[list[int]]:
    with start(folder) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def sparse(folder: str, context: dict[str, Any]) -> list[list[int]]:
    with start(folder, context) as llm:
        return answers(llm)


def test_selections_change_the_answer_and_are_told(folder, context, full, sparse) -> None:
    """The first decoding step reads everything, as published; the budget holds afterwards."""
    assert [a != b for a, b in zip(full, sparse, strict=True)].count(True) >= 2
    with start(folder, context) as llm:
        output = llm.generate([LONG[0]], GREEDY)[0]
        seen, report = output.metrics.context, llm.speculation_report().context
        assert (report.selector, seen.full_steps, seen.sparse_steps) == ("head", 1, 38)
        assert seen.read_entries == 23 * 38 + 90
        assert 0 < seen.captured_mass <= 1
        assert 0 < seen.overlap <= 1
        assert report.select_s > 0
    with start(folder, {**context, "first_full": 0}) as llm:
        answers(llm, LONG[:1])
        assert llm.speculation_report().context.full_steps == 0


@pytest.mark.parametrize("mode", ["sparse", "bounded", "lossless"])
def test_a_budget_that_holds_the_context_is_full_attention(folder, context, full, mode) -> None:
    with start(folder, {**context, "mode": mode, "budget": 200}) as llm:
        assert answers(llm) == full
        assert llm.speculation_report().context.sparse_steps == 0


def test_company_chunks_and_threads_change_nothing(folder, context, sparse) -> None:
    with start(folder, context) as llm:
        assert [answers(llm, [prompt])[0] for prompt in LONG] == sparse
    for rows, options in ((9, {}), (33, {"threads": 2, "prefix_caching": False})):
        with start(folder, context, max_num_batched_tokens=rows, **options) as llm:
            assert answers(llm) == sparse


def test_a_prefix_hit_is_the_cold_run(folder, context, sparse) -> None:
    """The head's keys are found with the pages, and its state behind them."""
    with start(folder, context) as llm:
        assert answers(llm) == sparse
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == sparse
        assert all(o.metrics.cached_tokens == (len(p) - 1) // 4 * 4 for o, p in zip(outputs, LONG, strict=True))


@pytest.mark.parametrize("mode", ["sparse", "bounded"])
def test_preemption_changes_nothing(folder, context, mode, monkeypatch) -> None:
    """What a recomputation would not give again goes along, the head's keys with it."""
    config, pages = {**context, "mode": mode, "full_every": 7}, 66
    with start(folder, config, max_model_len=pages * 4) as llm:
        expected = answers(llm)
        per_page = llm.core.resolved.kv_bytes // llm.core.resolved.num_pages
    with start(folder, config, max_model_len=pages * 4, kv_memory=per_page * pages) as llm:
        head, taken = llm.core.memory.reading.reader._head, []
        put = head.put
        monkeypatch.setattr(head, "put", lambda *args: (taken.append(len(args[0])), put(*args)))
        assert answers(llm) == expected
        assert llm.core.engine.scheduler.preemptions > 0
        assert sum(taken) > 0


def test_drafts_share_a_selection_and_leave_no_trace(folder, context, full) -> None:
    """One selection per verified block; rejected drafts have no keys."""
    with start(folder, context, speculative_config=DRAFTS) as llm:
        memory, checked = llm.core.memory, []
        head, release = memory.reading.reader._head, memory.release

        def check_and_release(sequence: Any) -> None:
            checked.append(head._traces[sequence.id].end == sequence.computed)
            release(sequence)

        memory.release = check_and_release
        said = answers(llm)
        report = llm.speculation_report()
        steps = report.context.sparse_steps + report.context.full_steps
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert steps == sum(map(len, said)) - len(LONG) - report.num_accepted_tokens
        assert checked == [True] * len(LONG)
    with start(folder, {**context, "budget": 200}, speculative_config=DRAFTS) as llm:
        assert answers(llm) == full


def test_one_head_drafts_and_selects(folder, context, full) -> None:
    """The same folder in both places; the target's states are tapped once for both."""
    drafting = {"drafters": [dict(context["selector"])], "num_speculative_tokens": 3}
    with start(folder, {**context, "budget": 200}, speculative_config=drafting) as llm:
        assert answers(llm) == full
        assert llm.speculation_report().num_draft_tokens > 0
    with start(folder, context, speculative_config=drafting) as llm:
        answers(llm)
        report = llm.speculation_report()
        assert llm.core.decoder.taps == (0, 1)
        assert report.num_draft_tokens > 0
        assert report.context.sparse_steps > 0
        assert all(drafter.failures == 0 for drafter in report.drafters)
    with start(folder, {**context, "mode": "lossless"}, speculative_config=drafting) as llm:
        assert answers(llm) == full
        assert llm.speculation_report().num_draft_tokens > 0


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)])
def test_lossless_mode_says_what_plain_decoding_says(folder, context, params) -> None:
    with start(folder) as llm:
        expected = answers(llm, params=params)
    with start(folder, {**context, "mode": "lossless", "budget": 16}) as llm:
        assert answers(llm, params=params) == expected
        report = llm.speculation_report()
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert report.context.sparse_steps > 0


def test_the_pipelined_loop_selects_too(folder, context) -> None:
    with start(folder, context, speculative_config={**DRAFTS, "pipeline": True}) as llm:
        answers(llm)
        assert llm.speculation_report().context.sparse_steps > 0


def test_samples_of_a_request_are_those_of_separate_requests(folder, context) -> None:
    params = replace(GREEDY, temperature=1.0, seed=4, n=3)
    with start(folder, context) as llm:
        together = answers(llm, LONG[:1], params)
        assert len({tuple(sample) for sample in together}) == 3
        assert answers(llm, LONG[:1], replace(params, n=1))[0] == together[0]


def test_an_abort_leaves_nothing_behind(folder, context, sparse) -> None:
    with start(folder, context) as llm:
        stream = llm.stream(LONG[0], GREEDY)
        for _ in range(9):
            next(stream)
        stream.close()
        llm.core.engine.check()
        reader: Any = llm.core.memory.reading.reader
        held = [reader._head._traces, *(v for v in vars(reader).values() if isinstance(v, dict))]
        assert all(not table for table in held)
        assert answers(llm) == sparse


def test_a_head_cannot_be_shown_what_was_computed_before(folder, context, full, sparse) -> None:
    """Turning to a head drops cached prompts; turning away from it keeps them."""
    with start(folder) as llm:
        assert answers(llm) == full
        llm.set_context_config(context)
        outputs = llm.generate(LONG, GREEDY)
        assert all(output.metrics.cached_tokens == 0 for output in outputs)
        llm.set_context_config(None)
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == full
        assert all(output.metrics.cached_tokens > 0 for output in outputs)
        assert llm.core.decoder.taps == ()


def test_kv_memory_pays_for_the_heads_keys(folder, context) -> None:
    with start(folder, context) as llm, start(folder) as plain:
        pages = llm.core.resolved.num_pages
        per_page = llm.core.resolved.kv_bytes // pages - plain.core.resolved.kv_bytes // plain.core.resolved.num_pages
        head = llm.core.memory.reading.reader._head
        assert pages * per_page == head.keys.nbytes + head._ends.nbytes
        assert llm.memory_plan()["selector"] == head.nbytes


def test_a_head_of_another_target_is_refused(folder, context, tmp_path) -> None:
    other = write_head(tmp_path, hidden_size=32)
    with pytest.raises(ModelError, match="hidden_size"):
        start(folder, {**context, "selector": other})
    with pytest.raises(ModelError, match="holds no config"):
        start(folder, {**context, "selector": "./some/head"})
