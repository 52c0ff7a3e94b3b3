"""Modes, per-request budgets and what the reader remembers."""

import numpy as np
import pytest

from outrider.config import ContextConfig
from outrider.errors import ConfigError
from outrider.memory.select import Look, float_rows, make_policy, make_reader
from outrider.memory.tiers.codec import to_bfloat16
from outrider.models.spec import DecoderSpec

PAGE, PAGES = 8, 32
SPEC = DecoderSpec("llama", 100, 32, 4, 4, 2, 8, 64, 512)
RNG = np.random.default_rng(0)
ROWS = np.arange(PAGES, dtype=np.int32)


def reader(**options):
    config = {"budget": 40, "sinks": 2, "window": 8, "group": 2}
    return make_reader(ContextConfig(**{**config, "first_full": 0, **options}), SPEC, PAGES, PAGE)


def feed(made, length, start=0, sequence=0):
    taps = len(made.taps)
    slots = np.arange(start, length, dtype=np.int32)
    keys = RNG.normal(size=(taps, length - start, 2, 8)).astype(np.float32)
    made.fold(slots, keys)
    made.remember(sequence, RNG.normal(size=(taps, 4, 8)).astype(np.float32))


def test_pages_read_everything_until_a_query_is_known_and_then_the_budget():
    assert reader(mode="sparse").taps == (0, 1, 2, 3)
    made = reader(mode="sparse", taps=1)
    assert made.taps == (1, 3)
    assert made.select([Look(0, 100, 1, ROWS)]) is None
    feed(made, 100)
    selection = made.select([Look(0, 100, 1, ROWS)])
    assert selection.entries.shape == (2, 1, 2, 39)
    assert selection.groups.tolist() == [0, 0, 1, 1]
    made.forget(0)
    assert made.select([Look(0, 100, 1, ROWS)]) is None


def test_the_first_steps_of_an_answer_read_everything():
    made = reader(mode="sparse", first_full=None)
    feed(made, 200)
    full = [made.select([Look(0, 200, 1, ROWS)]) is None for _ in range(6)]
    assert full == [True, True, True, True, False, False]


def test_a_requests_own_budget_and_prefill():
    made = reader(mode="sparse", selector="window")
    looks = [Look(0, 100, 1, ROWS), Look(1, 100, 1, ROWS, budget=20), Look(2, 100, 50, ROWS, prefill=True)]
    counts = made.select([*looks, Look(3, 10, 1, ROWS)]).counts
    assert counts[0, :, 0].tolist() == [39, 19, -1, -1]


@pytest.mark.parametrize("mode", ["full", "lossless"])
def test_modes_that_promise_the_full_answer_read_everything(mode):
    made = reader(mode=mode, selector="window")
    assert made.select([Look(0, 200, 1, ROWS)]) is None


def test_full_mode_needs_nothing():
    made = reader(mode="full", budget=1)
    assert made.taps == ()
    assert made.nbytes == 0


def test_bounded_mode_reads_everything_every_few_steps():
    made = reader(mode="bounded", selector="window", full_every=3)
    full = [made.select([Look(0, 100 + i, 1, ROWS)]) is None for i in range(9)]
    assert full == [False, False, True] * 3


def test_bounded_mode_reads_everything_after_a_poor_selection():
    policy = make_policy(ContextConfig(mode="bounded", full_every=100, min_captured=0.8))
    steps = []
    for captured in (0.9, 0.85, 0.7, 1.0, 0.9):
        steps.append(policy.wants_full(0))
        policy.note(0, steps[-1], captured)
    assert steps == [False, False, False, True, False]
    policy.note(0, False, 0.1)
    policy.forget(0)
    assert not policy.wants_full(0)


def test_the_poor_selection_is_noticed_through_the_scores():
    made = reader(mode="bounded", min_captured=0.99, full_every=100)
    feed(made, 200)
    full = [made.select([Look(0, 200, 1, ROWS)]) is None for _ in range(4)]
    assert full == [False, True, False, True]


def test_bad_selectors_and_budgets_are_refused_by_name():
    with pytest.raises(ConfigError, match="did you mean 'pages'"):
        reader(mode="sparse", selector="page")
    with pytest.raises(ConfigError, match="needs a path"):
        reader(mode="sparse", selector="head")
    with pytest.raises(ConfigError, match="use 11 or more"):
        reader(mode="sparse", budget=10)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_rows_of_every_kv_type_read_as_floats(kind):
    values = RNG.normal(size=(3, 2, PAGE, 16)).astype(np.float32)
    scales = None
    plane = values
    if kind == "bfloat16":
        plane = to_bfloat16(values)
    if kind == "int8":
        scales = np.abs(values).max(-1) / 127
        plane = np.rint(values / scales[..., None]).astype(np.int8)
    slots = np.array([0, 9, 23], np.int32)
    rows = float_rows(plane, scales, slots, 8)
    expected = np.stack([values[slot // PAGE, :, slot % PAGE, :8] for slot in slots])
    np.testing.assert_allclose(rows, expected, atol={"float32": 0, "bfloat16": 0.02, "int8": 0.02}[kind])


def test_threads_choose_what_one_thread_chooses(monkeypatch):
    monkeypatch.setattr("outrider.memory.select.reader.WORTH_THREADS", 100)
    config = ContextConfig(mode="sparse", budget=40, sinks=2, window=8, group=2, first_full=0)
    alone, many = (make_reader(config, SPEC, PAGES, PAGE, threads=count) for count in (1, 3))
    for step in range(5):
        for made in (alone, many):
            bounds = made.chooser.selector.summaries.bounds
            bounds[:] = to_bfloat16(np.random.default_rng(step).normal(size=bounds.shape).astype(np.float32))
            for s in range(4):
                queries = np.random.default_rng(10 * step + s).normal(size=(4, 4, 8))
                made.remember(s, queries)
        looks = [Look(s, 100 + 20 * s + step, 1, ROWS) for s in range(4)]
        for some in (looks, looks[:1]):  # sequences side by side, and the layers of one
            first, second = alone.select(some), many.select(some)
            assert (first.entries == second.entries).all()
            assert (first.counts == second.counts).all()
    assert alone._pool is None
    assert many._pool is not None
    many.close()
    many.close()
