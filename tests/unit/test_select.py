"""Selectors: kernels against plain numpy, the budget rules, and what each selector sees."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, UnsupportedError
from outrider.memory.select import (
    Chooser,
    OracleSelector,
    PageSelector,
    PageSummaries,
    Sticky,
    View,
    WindowSelector,
    captured_mass,
    check_budget,
    group_layers,
    spread_taps,
)
from outrider.memory.select.kernels import choose_rows, kth_largest, rank
from outrider.memory.select.reference import attention_weights, choose_entries, page_bounds, page_mass

LAYERS, HEADS, KV, DIM, PAGE = 4, 8, 2, 16, 8
RNG = np.random.default_rng(0)


def view(length, budget=64, block=1, queries=None, sequence=0, pages=None):
    pages = np.arange(-(-length // PAGE), dtype=np.int32) if pages is None else pages
    return View(sequence, length, block, budget, pages, queries)


class Table:
    """A selector whose scores are given."""

    name, unit, taps, weighs = "table", 1, (), True
    groups = np.zeros(LAYERS, np.int32)

    def __init__(self, scores, unit=1):
        self.scores, self.unit = np.asarray(scores, np.float32), unit

    def score(self, view, share=map):
        return self.scores[:, :, : -(-view.length // self.unit)].copy()


def as_bfloat16(values):
    """The nearest values that bounds can hold."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def paged(keys, rng=RNG, spare=3):
    """Keys [n, H, D] spread over shuffled physical pages: (pages, slots, number of pages)."""
    count = -(-len(keys) // PAGE)
    pages = rng.permutation(count + spare)[:count].astype(np.int32)
    entries = np.arange(len(keys))
    return pages, (pages[entries // PAGE] * PAGE + entries % PAGE).astype(np.int32), count + spare


# ---- kernels against their meaning


@given(st.lists(st.sampled_from([-3.0, 0.0, 1.0, 2.5, 7.0, float("inf")]) | st.floats(-9, 9, width=32), min_size=1),
       st.data())  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_kth_largest_is_that_of_a_sort(values, data):
    k, scores = data.draw(st.integers(1, len(values))), np.array(values, np.float32)
    keys = np.empty(len(values), np.int32)
    rank(scores, keys)
    assert kth_largest(keys, k) == sorted(keys.tolist(), reverse=True)[k - 1]
    assert ((keys[:, None] < keys) == (scores[:, None] < scores)).all()


@given(st.integers(1, 90), st.sampled_from([1, 4, 8]), st.integers(0, 6), st.integers(1, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_chosen_entries_are_the_references(length, unit, sinks, window, data):
    keep = data.draw(st.integers(min(sinks, length) + min(window, length), length + 20))
    few = st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("-inf")])
    scores = data.draw(st.lists(few | st.floats(-5, 5, width=32), min_size=-(-length // unit), max_size=99))
    scores = np.array(scores[: -(-length // unit)], np.float32)
    keep = min(keep, length)
    out = np.full((1, 1, keep), -1, np.int32)
    choose_rows(scores[None, None], unit, length, keep, sinks, window, out)
    expected = choose_entries(scores, unit, length, keep, sinks, window)
    assert out[0, 0].tolist() == expected.tolist()
    assert len(expected) == keep
    assert (np.diff(out[0, 0]) > 0).all()
    assert set(range(min(sinks, length))) <= set(expected.tolist())
    assert set(range(max(0, length - window), length)) <= set(expected.tolist())


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("unit", [PAGE, PAGE // 2])
@pytest.mark.parametrize("length", [1, PAGE, 37])
@pytest.mark.parametrize("dim", [DIM, 24, 64, 128])  # padded; one row of bounds, two
@pytest.mark.parametrize("taps_per_group", [1, 0])
def test_page_scores_are_the_references(heads, unit, length, dim, taps_per_group):
    groups = group_layers(LAYERS, 2)
    taps, tap_groups = spread_taps(groups, taps_per_group)
    keys = as_bfloat16(RNG.normal(size=(len(taps), length, KV, dim)))
    pages, slots, physical = paged(keys[0])
    summaries = PageSummaries(len(taps), physical, KV, PAGE, dim, unit)
    for start in range(0, length, 5):  # as chunks and steps come
        summaries.fold(slots[start : start + 5], keys[:, start : start + 5])
    queries = RNG.normal(size=(len(taps), heads, dim)).astype(np.float32)
    selector = PageSelector(summaries, groups, taps_per_group, tightness=0.5)
    scores = selector.score(view(length, queries=queries, pages=pages))
    masses = [
        page_mass(queries[tap] / np.sqrt(dim), *page_bounds(keys[tap], unit), tightness=0.5) for tap in range(len(taps))
    ]
    for group in range(len(scores)):
        mass = sum(masses[tap] for tap in np.flatnonzero(tap_groups == group))
        np.testing.assert_allclose(np.exp(scores[group]), mass, rtol=1e-4)
    with ThreadPoolExecutor(2) as pool:
        shared = selector.score(view(length, queries=queries, pages=pages), pool.map)
    assert (shared == scores).all()


def test_what_is_not_a_number_ranks_last():
    summaries = PageSummaries(1, 20, KV, PAGE, DIM)
    slots = np.arange(12 * PAGE, dtype=np.int32)
    summaries.fold(slots, RNG.normal(size=(1, len(slots), KV, DIM)).astype(np.float32))
    queries = RNG.normal(size=(1, HEADS, DIM)).astype(np.float32)
    queries[0, 0, 3] = np.nan  # of KV head 0
    pages = np.arange(12, dtype=np.int32)
    scores = PageSelector(summaries, group_layers(LAYERS, 0)).score(view(len(slots), queries=queries, pages=pages))
    assert np.isnan(scores[0, 0]).all()
    assert np.isfinite(scores[0, 1]).all()


def test_full_tightness_bounds_every_key_of_the_page():
    keys = RNG.normal(size=(32, KV, DIM)).astype(np.float32)
    query = RNG.normal(size=(KV, DIM)).astype(np.float32)
    low, high = page_bounds(keys, PAGE)
    upper = (np.maximum(query, 0) * high + np.minimum(query, 0) * low).sum(-1)
    exact = np.einsum("hd,nhd->nh", query, keys).reshape(-1, PAGE, KV).max(1)
    assert (upper >= exact - 1e-5).all()


def test_a_groups_selection_sees_every_query_of_the_group():
    """32 query and 8 KV heads; the entry that only the last query of a group wants is chosen."""
    keys = np.zeros((40, 8, DIM), np.float32)
    keys[17, 5] = 1
    query = np.zeros((32, DIM), np.float32)
    query[5 * 4 + 3] = 40
    weights = attention_weights(query, keys).reshape(8, 4, 40).max(1)
    rows = choose_entries(np.log(weights[5]), 1, 40, 4, 1, 2)
    assert 17 in rows
    assert 17 not in choose_entries(np.log(weights[4]), 1, 40, 4, 1, 2)


# ---- the budget


def select(length, budget, block=1, sinks=2, window=3, groups=1):
    scores = RNG.normal(size=(groups, KV, max(1, length)))
    chooser = Chooser(Table(scores), KV, sinks, window)
    return chooser.select([view(length, budget, block)])


@pytest.mark.parametrize("length", [1, 2, 3, 6, 20])
def test_a_budget_that_holds_everything_selects_nothing(length):
    """The engine then runs the very kernels of full attention."""
    assert select(length, length + 1) is None
    assert select(length, length + 100) is None


@pytest.mark.parametrize("block", [1, 3])
def test_the_block_is_in_the_budget(block):
    made = select(30, 16, block)
    assert (made.counts == 16 - block).all()


def test_a_block_beyond_the_budget_keeps_sinks_and_window():
    made = select(30, 8, block=20)
    assert made.entries[0, 0, 0].tolist() == [0, 1, 27, 28, 29]


@pytest.mark.parametrize(("budget", "hint"), [(0, "use 69 or more"), (68, "69"), (-5, "69")])
def test_a_budget_too_small_is_a_clear_error(budget, hint):
    with pytest.raises(ConfigError, match=hint):
        check_budget(budget, 4, 64)
    with pytest.raises(UnsupportedError, match=hint) as caught:
        check_budget(budget, 4, 64, request_id="r1")
    assert caught.value.request_id == "r1"


def test_odd_sinks_and_windows_are_refused():
    check_budget(69, 4, 64)
    with pytest.raises(ConfigError, match="sinks"):
        check_budget(100, -1, 64)
    with pytest.raises(ConfigError, match="window"):
        check_budget(100, 0, 0)


def test_a_sequences_selection_does_not_depend_on_its_neighbours():
    """Alone, beside a short one, beside a very long one; padding is never selected."""
    scores = RNG.normal(size=(1, KV, 500))
    chooser = Chooser(Table(scores), KV, 2, 3)
    alone = chooser.select([view(40, 16)])
    for other in (view(3, 16, sequence=1), view(500, 64, sequence=1)):
        both = chooser.select([view(40, 16), other])
        count = both.counts[0, 0, 0]
        assert (both.counts[:, 0] == alone.counts[:, 0]).all()
        assert (both.entries[:, 0, :, :count] == alone.entries[:, 0]).all()
        assert both.counts[0, 1, 0] == (-1 if other.length == 3 else 63)


def test_a_selector_that_cannot_tell_reads_everything():
    summaries = PageSummaries(1, 20, KV, PAGE, DIM)
    chooser = Chooser(PageSelector(summaries, group_layers(LAYERS, 0)), KV, 2, 3)
    assert chooser.select([view(100, 16)]) is None


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 4), st.integers(0, 4), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_selection_is_ascending_within_the_length_and_of_the_right_size(length, budget, block, sinks, window):
    made = Chooser(Table(RNG.normal(size=(1, KV, 60))), KV, sinks, window).select([view(length, budget, block)])
    keep = max(budget - block, sinks + window)
    if length <= keep:
        assert made is None
        return
    assert made.entries.shape == (1, 1, KV, keep)
    assert (np.diff(made.entries, axis=-1) > 0).all()
    assert made.entries.min() >= 0
    assert made.entries.max() == length - 1


# ---- selectors


def test_window_reads_sinks_and_the_latest():
    made = Chooser(WindowSelector(group_layers(LAYERS, 0), KV), KV, 4, 8).select([view(300, 65)])
    assert made.entries[0, 0, 1].tolist() == [0, 1, 2, 3, *range(240, 300)]


def test_pages_find_the_page_that_matters():
    keys = RNG.normal(size=(2, 200, KV, DIM)).astype(np.float32) * 0.1
    query = RNG.normal(size=DIM).astype(np.float32)
    keys[:, 91, 1] = query * 3
    pages, slots, physical = paged(keys[0])
    summaries = PageSummaries(2, physical, KV, PAGE, DIM)
    summaries.fold(slots, keys)
    queries = np.zeros((2, HEADS, DIM), np.float32)
    queries[:, HEADS - 1] = query
    selector = PageSelector(summaries, group_layers(LAYERS, 2), 1)
    made = Chooser(selector, KV, 2, 8).select([view(200, 33, queries=queries, pages=pages)])
    assert {88, 91, 95} <= set(made.entries[0, 0, 1].tolist())
    assert 91 not in made.entries[0, 0, 0]


def test_summaries_follow_pages():
    """A recycled page starts anew, and what was never committed is never seen."""
    summaries = PageSummaries(1, 3, KV, PAGE, DIM)
    old = np.full((1, PAGE, KV, DIM), 50, np.float32)
    summaries.fold(np.arange(PAGE, dtype=np.int32), old)
    summaries.fold(np.arange(3, dtype=np.int32), np.ones((1, 3, KV, DIM), np.float32))
    assert (summaries.bounds[:, 0] == np.float32(1).view(np.uint32) >> 16).all()
    with pytest.raises(ConfigError, match="divisor"):
        PageSummaries(1, 3, KV, PAGE, DIM, unit=3)


def test_sticky_keeps_unless_beaten_by_the_margin():
    scores = np.zeros((1, KV, 10), np.float32)
    scores[..., 2] = 1
    table = Table(scores)
    chooser = Chooser(table, KV, 1, 2, Sticky(0.5))
    assert 2 in chooser.select([view(10, 5)]).entries[0, 0, 0]
    table.scores[..., 5] = 1.4
    assert 2 in chooser.select([view(10, 5)]).entries[0, 0, 0]
    table.scores[..., 5] = 1.6
    made = chooser.select([view(10, 5)]).entries[0, 0, 0]
    assert 5 in made
    assert 2 not in made
    chooser.forget(0)
    table.scores[..., 2] = 1.7
    assert 2 in chooser.select([view(10, 5)]).entries[0, 0, 0]


def test_sticky_moves_less_and_loses_little():
    rng, plain_moved, sticky_moved, last = np.random.default_rng(1), 0, 0, {}
    base = rng.normal(size=(1, KV, 400)) * 2
    table = Table(base)
    choosers = {"plain": Chooser(table, KV, 2, 4), "sticky": Chooser(table, KV, 2, 4, Sticky(1.0))}
    for step in range(20):
        table.scores = (base + rng.normal(size=base.shape) * 0.5).astype(np.float32)
        for name, chooser in choosers.items():
            now = set(chooser.select([view(300 + step, 65)]).entries[0, 0, 0].tolist())
            moved = len(now - last.get(name, now))
            plain_moved += moved * (name == "plain")
            sticky_moved += moved * (name == "sticky")
            last[name] = now
    assert 0 < sticky_moved < plain_moved / 2


def test_sticky_without_margin_is_the_inner_selector():
    table = Table(RNG.normal(size=(1, KV, 100)))
    plain, sticky = Chooser(table, KV, 2, 4), Chooser(table, KV, 2, 4, Sticky(0.0))
    for length in (60, 61, 62):
        assert (plain.select([view(length, 20)]).entries == sticky.select([view(length, 20)]).entries).all()
    with pytest.raises(ConfigError, match="sticky"):
        Sticky(-1.0)


def test_the_oracle_captures_most_and_everything_captures_all():
    queries = RNG.normal(size=(LAYERS, HEADS, DIM)).astype(np.float32) * 2
    keys = RNG.normal(size=(LAYERS, 120, KV, DIM)).astype(np.float32)
    groups = group_layers(LAYERS, 1)
    oracle = Chooser(OracleSelector(lambda v: (queries, keys[:, : v.length]), groups), KV, 1, 1)
    window = Chooser(WindowSelector(groups, KV), KV, 1, 1)
    best, recent = (c.select([view(119, 31)]).entries for c in (oracle, window))

    def share(entries):
        return np.mean([captured_mass(queries[i], keys[i], entries[i, 0]) for i in range(LAYERS)])

    assert share(recent) < 0.6 < share(best) < 1
    assert share(np.broadcast_to(np.arange(119), (LAYERS, 1, KV, 119))) == pytest.approx(1, abs=1e-5)


def test_groups_and_taps():
    assert group_layers(5, 0).tolist() == [0] * 5
    assert group_layers(5, 2).tolist() == [0, 0, 1, 1, 2]
    assert group_layers(5, 10**30).tolist() == [0] * 5
    assert spread_taps(group_layers(30, 6), 2)[0] == (1, 4, 7, 10, 13, 16, 19, 22, 25, 28)
    assert spread_taps(group_layers(5, 2), 2)[0] == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="group"):
        group_layers(4, -1)


@pytest.mark.parametrize("unit", [1, 4])
def test_the_captured_share_is_that_of_the_mass(unit):
    scores = RNG.normal(size=(2, KV, -(-30 // unit))).astype(np.float32)
    table = Table(scores, unit)
    table.groups = np.array([0, 0, 1, 1], np.int32)
    chooser = Chooser(table, KV, 2, 3)
    entries, used = chooser.choose_scored(view(30, 12))
    mass = np.repeat(np.exp(scores.astype(np.float64)), unit, axis=-1)[:, :, :30]
    sizes = np.array([min(unit, 30 - e // unit * unit) for e in range(30)])
    mass = mass / sizes / np.exp(scores.astype(np.float64)).sum(-1, keepdims=True)
    expected = np.take_along_axis(mass, entries, axis=-1).sum(-1).mean(1).min()
    assert chooser.captured(view(30, 12), entries, used) == pytest.approx(expected, rel=1e-5)
    assert chooser.captured(view(30, 12), None, None) == 1
    assert Chooser(WindowSelector(table.groups, KV), KV, 2, 3).captured(view(30, 12), entries, used) == 1
