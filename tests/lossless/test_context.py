"""Reading less of the context, on tiny models and both decoders: what must stay bitwise the same, and what is told.

K numbers are those of the known failures of sparse and tiered caches (docs/context.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contexts import GREEDY, LONG, answers, start
from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, UnsupportedError
from outrider.memory.tiers.codec import to_bfloat16

SPARSE = {"mode": "sparse", "budget": 24, "sinks": 2, "window": 4, "group": 1, "first_full": 0}
SHORT = [[5], [5, 6], [5, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("context") / "model")


@pytest.fixture(scope="module", params=["compiled", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def full(folder: str) -> list[list[int]]:
    with start(folder) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def sparse(folder: str) -> list[list[int]]:
    with start(folder, SPARSE) as llm:
        return answers(llm)


# --- what is the same as full attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["pages", "window"])
@pytest.mark.parametrize("mode", ["sparse", "bounded", "lossless"])
def test_a_budget_that_holds_the_context_is_full_attention(folder, backend, mode, selector) -> None:
    prompts = [*SHORT, LONG[2]]
    with start(folder, backend=backend) as llm:
        expected = answers(llm, prompts)
    with start(folder, {**SPARSE, "mode": mode, "selector": selector, "budget": 80}, backend=backend) as llm:
        assert answers(llm, prompts) == expected
        report = llm.speculation_report().context
        assert (report.mode, report.selector, report.sparse_steps) == (mode, selector, 0)
        assert report.full_steps > 0 or mode == "lossless"


def test_selections_change_the_answer_once_the_context_is_longer(full, sparse) -> None:
    """Otherwise the other tests would prove nothing."""
    assert [a != b for a, b in zip(full, sparse, strict=True)].count(True) >= 2


def test_both_decoders_read_the_same(folder, sparse) -> None:
    with start(folder, SPARSE, backend="reference") as llm:
        assert answers(llm) == sparse


def test_a_full_step_every_step_is_full_attention(folder, full) -> None:
    with start(folder, {**SPARSE, "mode": "bounded", "full_every": 1}) as llm:
        assert answers(llm) == full


def test_bounded_mode_takes_full_steps(folder) -> None:
    with start(folder, {**SPARSE, "mode": "bounded", "full_every": 5, "min_captured": 0.0}) as llm:
        answers(llm)
        report = llm.speculation_report().context
    assert 3 * report.full_steps < report.sparse_steps < 5 * report.full_steps
    with start(folder, {**SPARSE, "mode": "bounded", "full_every": 1000, "min_captured": 1.0}) as llm:
        answers(llm)
        report = llm.speculation_report().context
    assert 0.4 < report.full_steps / (report.full_steps + report.sparse_steps) < 0.6


LOSSLESS: list[dict[str, Any] | None] = [
    None,
    {"drafters": ["sparse_self"], "num_speculative_tokens": 1},
    {"drafters": ["ngram", {"name": "sparse_self", "min_confidence": 0.3}], "num_speculative_tokens": 8},
    {"drafters": ["suffix", "ngram"], "vote": "hedge", "num_speculative_tokens": 5},
    {"drafters": ["ngram"], "vote": "majority", "length": "trend", "num_speculative_tokens": [1, 6]},
]


@pytest.mark.parametrize("speculation", LOSSLESS)
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)])
def test_lossless_mode_says_what_plain_decoding_says(folder, backend, speculation, params) -> None:
    """With a budget this small some drafts are wrong at every place, and leave nothing behind."""
    with start(folder, backend=backend) as llm:
        expected = answers(llm, params=params)
    context = {**SPARSE, "mode": "lossless", "budget": 16}
    with start(folder, context, backend=backend, speculative_config=speculation) as llm:
        assert answers(llm, params=params) == expected
        report = llm.speculation_report()
        own = next(drafter for drafter in report.drafters if drafter.name == "sparse_self")
        assert own.failures == 0
        assert own.agreed_tokens > 0
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert report.context.sparse_steps > 0


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_lossless_mode_with_small_pages_and_every_kv_type(folder, kv) -> None:
    options = {"kv_cache_dtype": kv, "max_num_batched_tokens": 24}
    with start(folder, **options) as llm:
        expected = answers(llm)
    with start(folder, {**SPARSE, "mode": "lossless"}, **options) as llm:
        assert answers(llm) == expected
        assert llm.speculation_report().num_accepted_tokens > 0


# --- what a sparse answer does not depend on ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sparse", "bounded"])
def test_an_answer_does_not_depend_on_company_chunks_or_threads(folder, backend, mode) -> None:
    """Alone, together, beside a very long prompt, in chunks that end anywhere."""
    context = {**SPARSE, "mode": mode, "full_every": 7}
    with start(folder, context, backend=backend) as llm:
        expected = answers(llm)
        assert [answers(llm, [prompt])[0] for prompt in LONG] == expected
    for rows, options in ((9, {}), (33, {"threads": 2, "prefix_caching": False})):
        with start(folder, context, backend=backend, max_num_batched_tokens=rows, **options) as llm:
            assert answers(llm) == expected


def test_a_prefix_hit_is_the_cold_run(folder, sparse) -> None:
    """The summaries of shared pages are there too, so the same entries are selected."""
    with start(folder, SPARSE) as llm:
        assert answers(llm) == sparse
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == sparse
        assert all(o.metrics.cached_tokens == (len(p) - 1) // 4 * 4 for o, p in zip(outputs, LONG, strict=True))


def test_only_what_was_read_in_full_is_shared(folder) -> None:
    """A second turn computes the first answer again: its entries were made from a part of the context."""
    with start(folder, SPARSE) as llm:
        turn = [*LONG[0], *answers(llm, LONG[:1])[0], 7, 8]
        warm = llm.generate([turn], GREEDY)[0]
        assert warm.metrics.cached_tokens == len(LONG[0]) // 4 * 4
        llm.core.memory.pool.drop_cached()
        assert answers(llm, [turn])[0] == warm.outputs[0].token_ids
    with start(folder, {**SPARSE, "mode": "lossless"}) as llm:
        turn = [*LONG[0], *answers(llm, LONG[:1])[0], 7, 8]
        assert llm.generate([turn], GREEDY)[0].metrics.cached_tokens > len(LONG[0]) + 30


@pytest.mark.parametrize("selector", ["pages", "window"])
@pytest.mark.parametrize("mode", ["sparse", "bounded"])
def test_preemption_changes_nothing(folder, mode, selector, monkeypatch) -> None:
    """A preempted sequence takes along what a recomputation would not give again."""
    context = {**SPARSE, "mode": mode, "selector": selector, "full_every": 7}
    with start(folder, context) as llm:
        expected = answers(llm)
        per_page = llm.core.resolved.kv_bytes // llm.core.resolved.num_pages
    pages = -(-max(map(len, LONG)) // 4) + 11 + 24
    with start(folder, context, kv_memory=pages * per_page, max_model_len=pages * 4) as llm:
        put, taken = llm.core.memory.cache.put, []
        monkeypatch.setattr(llm.core.memory.cache, "put", lambda *args: (taken.append(len(args[0])), put(*args)))
        assert answers(llm) == expected
        assert llm.core.engine.scheduler.preemptions > 0
        assert sum(taken) > 0


def test_samples_of_a_request_are_those_of_separate_requests(folder) -> None:
    params = replace(GREEDY, temperature=1.0, seed=4, n=3)
    with start(folder, SPARSE) as llm:
        together = answers(llm, LONG[:1], params)
        assert len({tuple(sample) for sample in together}) == 3
        assert answers(llm, LONG[:1], replace(params, n=1))[0] == together[0]


def test_an_abort_leaves_nothing_behind(folder) -> None:
    with start(folder, {**SPARSE, "mode": "bounded"}) as llm:
        expected = answers(llm)
        stream = llm.stream(LONG[0], GREEDY)
        for _ in range(9):
            next(stream)
        stream.close()
        llm.core.engine.check()
        reading: Any = llm.core.memory.reading
        held = [reading._whole, *(v for v in vars(reading.reader).values() if isinstance(v, dict))]
        assert all(not table for table in held)
        assert answers(llm) == expected


@pytest.mark.parametrize("budget", [24, 200])
def test_drafting_beside_the_target_reads_the_same_way(folder, full, budget) -> None:
    """The pipelined loop prepares and commits as the plain one does."""
    config = {"drafters": ["ngram", "suffix"], "vote": "hedge", "num_speculative_tokens": 4, "pipeline": True}
    with start(folder, {**SPARSE, "budget": budget}, speculative_config=config) as llm:
        said = answers(llm)
        report = llm.speculation_report()
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert (report.context.sparse_steps > 0) == (budget == 24)
    assert (said == full) == (budget == 200)


@pytest.mark.parametrize("drafters", [["ngram"], ["ngram", "suffix"]])
def test_rejected_drafts_leave_no_trace_in_what_selections_rest_on(folder, drafters, monkeypatch) -> None:
    """Summaries cover the committed keys and nothing else, whatever was drafted."""
    config = {"drafters": drafters, "vote": "hedge", "num_speculative_tokens": 5}
    with start(folder, SPARSE, speculative_config=config) as llm:
        memory, checked = llm.core.memory, []
        release = memory.release

        def check_and_release(sequence: Any) -> None:
            slots = memory._table(sequence).slots(0, sequence.computed)
            checked.append(summaries_are_of(memory, slots))
            release(sequence)

        monkeypatch.setattr(memory, "release", check_and_release)
        answers(llm)
        report = llm.speculation_report()
    assert report.num_draft_tokens > report.num_accepted_tokens > 0
    assert checked == [True] * len(LONG)


def summaries_are_of(memory: Any, slots: np.ndarray) -> bool:
    """Whether the summaries of a sequence's pages are the bounds of its committed keys."""
    pages, reading = slots[::4] // 4, memory.reading
    bounds = reading.reader.chooser.selector.summaries.bounds
    for tap, layer in enumerate(reading.taps):
        keys = memory.cache.key_rows((layer,), slots)[0]
        own = [keys[at : at + 4] for at in range(0, len(keys), 4)]
        expected = to_bfloat16(np.stack([np.stack([k.min(0), k.max(0)], axis=1) for k in own]))
        if not (bounds[tap, pages, :, :, : keys.shape[-1]] == expected).all():
            return False
    return True


# --- what is told, and what is refused ------------------------------------------------------------------------------


def test_every_report_says_what_was_read(folder) -> None:
    from outrider.cli.footer import Record

    with start(folder, SPARSE, speculative_config=None) as llm:
        output = llm.generate([LONG[0]], replace(GREEDY, extra_args={"context_budget": 30}))[0]
        seen, report = output.metrics.context, llm.speculation_report().context
        assert (seen.mode, seen.budget, seen.full_steps) == ("sparse", 30, 0)
        assert seen.sparse_steps == len(output.outputs[0].token_ids) - 1 == report.sparse_steps
        assert seen.read_entries == 29 * seen.sparse_steps
        assert 0.1 < seen.captured_mass <= 1
        assert 0.1 < seen.overlap <= 1
        assert report.captured == pytest.approx(seen.captured_mass)
        assert report.overlap == pytest.approx(seen.overlap)
        assert report.select_s > 0
        assert llm.memory_plan()["selector"] == report.selector_bytes > 0
        assert output.to_dict()["context"]["mode"] == "sparse"
        record = Record(llm.context_mode)
        for piece in llm.stream(LONG[0], GREEDY):
            record.add(piece)
        assert "sparse context, budget 24: " in record.line()
        assert "of attention" in record.line()
    with start(folder) as llm:
        assert llm.generate([SHORT[0]], GREEDY)[0].metrics.context.to_dict()["mode"] == "full"
        assert llm.memory_plan()["selector"] == 0


def test_full_mode_holds_and_asks_nothing(folder) -> None:
    with start(folder, {"mode": "full", "budget": 1}) as llm:
        assert llm.core.decoder.query_taps == ()
        assert type(llm.core.memory.reading).__name__ == "FullAttention"


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({"mode": "sparse", "budget": 6}, "use 69 or more"),
        ({**SPARSE, "budget": 6}, "use 7 or more"),
        ({"budget": 0}, "budget = 0 is refused"),
        ({**SPARSE, "selector": "head"}, "needs a path"),
        ({**SPARSE, "selector": {"name": "head", "path": "x", "layers": 2}}, "unknown"),
        ({**SPARSE, "first_full": -1}, "use 0 or more"),
        ({**SPARSE, "selector": "page"}, "did you mean 'pages'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(folder, context, words) -> None:
    with pytest.raises(ConfigError, match=words):
        start(folder, context)


def test_budgets_of_requests_are_checked(folder) -> None:
    with start(folder, SPARSE) as llm:
        with pytest.raises(UnsupportedError, match="use 7 or more"):
            llm.generate([LONG[0]], replace(GREEDY, extra_args={"context_budget": 6}))
        with pytest.raises(UnsupportedError, match="number of entries"):
            replace(GREEDY, extra_args={"context_budget": "much"})
    with start(folder) as llm, pytest.raises(UnsupportedError, match="while everything is read"):
        llm.generate([LONG[0]], replace(GREEDY, extra_args={"context_budget": 64}))


def test_lossless_mode_is_a_drafter_of_its_own(folder) -> None:
    with pytest.raises(ConfigError, match="needs context_config"):
        start(folder, SPARSE, speculative_config={"drafters": ["sparse_self"]})
    lossless = {**SPARSE, "mode": "lossless"}
    with pytest.raises(ConfigError, match="pipeline"):
        start(folder, lossless, speculative_config={"drafters": ["ngram"], "pipeline": True})
    with start(folder, lossless) as llm:
        assert llm.core.resolved.speculative.drafters == ("sparse_self",)
        llm.set_speculative_config({"drafters": ["ngram"]})
        assert llm.core.resolved.speculative.drafters == ("ngram", "sparse_self")


@pytest.fixture(scope="module")
def article() -> str:
    """About 1400 tokens with a fact near the beginning."""
    lines = [f"Entry {i}: the lamp of house number {i} is {['red', 'green', 'blue'][i % 3]}." for i in range(90)]
    lines[7] = "Entry 7: the secret word of the harbour master is marzipan."
    return "\n".join(lines) + "\nQuestion: what is the secret word of the harbour master?\nAnswer: the secret word is"


@pytest.mark.model
def test_on_the_default_model(article: str) -> None:
    """Lossless is bitwise plain; half of the context finds the fact; a large budget is full attention."""
    params = SamplingParams(temperature=0, max_tokens=24)
    options: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 1, "speculative_config": None}
    with LLM("smollm2-135m", **options) as llm:
        plain = llm.generate(article, params)[0].outputs[0]
    assert "marzipan" in plain.text
    with LLM("smollm2-135m", context_config={"mode": "sparse", "budget": 512}, **options) as llm:
        some = llm.generate(article, params)[0]
        assert "marzipan" in some.outputs[0].text
        assert some.metrics.context.sparse_steps > 0
        assert some.metrics.context.captured_mass > 0.7
        every = llm.generate(article, replace(params, extra_args={"context_budget": 4096}))[0]
        assert every.outputs[0].token_ids == plain.token_ids
    with LLM("smollm2-135m", context_config={"mode": "lossless", "budget": 512}, **options) as llm:
        lossless = llm.generate(article, params)[0]
        assert lossless.outputs[0].token_ids == plain.token_ids
        assert lossless.metrics.speculative.acceptance_length > 2


def test_the_way_of_reading_can_be_changed_while_idle(folder, full, sparse) -> None:
    """Cached prompts stay, and a new selector is shown their keys."""
    with start(folder) as llm:
        assert answers(llm) == full
        for context, expected in ((SPARSE, sparse), ({**SPARSE, "mode": "lossless"}, full), (SPARSE, sparse)):
            llm.set_context_config(context)
            outputs = llm.generate(LONG, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert all(output.metrics.cached_tokens > 0 for output in outputs)
        llm.set_context_config(None)
        llm.set_speculative_config("auto")
        assert answers(llm) == full


def test_the_context_benchmark_measures_every_way(folder) -> None:
    from outrider.bench.context import MODES, kv_bytes, make_prompts, measure_cells, parse_ways

    with start(folder) as llm:
        room = kv_bytes(llm.core.spec, "float32", "auto", 4 * 160)
        prompts = make_prompts(llm, None, 3, 120)
    with start(folder, kv_memory=room) as llm:
        assert [len(prompt) for prompt in prompts] == [120] * 3
        cells = measure_cells(llm, parse_ways(["full", "sparse", "window", "lossless"], [90]), prompts, 12, 2)
    rows = [cell.row(cells[0], 120) for cell in cells]
    assert [row["mode"] for row in rows] == ["full", "sparse", "window", "lossless"]
    assert [row["identical"] for row in (rows[0], rows[3])] == [True, True]
    assert rows[0]["read_share"] is None
    assert 0.5 < rows[1]["read_share"] < 0.8
    assert rows[1]["ratio_to_full"] > 0
    assert set(MODES) >= {"full", "sparse", "bounded", "lossless"}
