"""Pages: reference counts, prefix sharing, eviction order, and the map from entries to slots."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.errors import CapacityError
from outrider.memory.pool import PagePool
from outrider.memory.table import PageTable


def filled(pool: PagePool, tokens: list[int], size: int = 4) -> PageTable:
    """A table that has computed and published `tokens`."""
    table = PageTable(pool, size)
    table.reserve(len(tokens))
    table.publish(tokens)
    return table


def test_pages_come_back_when_the_last_holder_leaves() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.retain(page)
    pool.release(page)
    assert pool.available == 2
    pool.release(page)
    assert pool.available == 3
    pool.check()


def test_an_empty_pool_is_a_clear_error() -> None:
    pool = PagePool(1)
    pool.take()
    with pytest.raises(CapacityError, match="kv_memory"):
        pool.take()


def test_releasing_a_free_page_is_caught() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)


def test_entries_map_to_slots_across_pages() -> None:
    pool = PagePool(8)
    table = PageTable(pool, 4)
    table.reserve(10)
    expected = [table.pages[e // 4] * 4 + e % 4 for e in range(10)]
    assert table.slots(0, 10).tolist() == expected
    assert table.slots(5, 1).tolist() == expected[5:6]
    assert table.slots(3, 4).dtype == np.int32


def test_a_prompt_that_begins_alike_shares_full_pages_only() -> None:
    pool = PagePool(16)
    first = filled(pool, list(range(10)))
    second = PageTable(pool, 4)
    assert second.adopt([*range(10), 99]) == 8
    assert second.pages == first.pages[:2]
    assert pool.held == 3
    assert PageTable(pool, 4).adopt([0, 1, 2, 98, 4, 5]) == 0


def test_one_token_is_always_left_to_compute() -> None:
    pool = PagePool(16)
    filled(pool, list(range(8)))
    assert PageTable(pool, 4).adopt(list(range(8))) == 4


def test_a_page_depends_on_everything_before_it() -> None:
    pool = PagePool(16)
    filled(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert PageTable(pool, 4).adopt([2, 2, 2, 2, 5, 6, 7, 8, 9]) == 0


def test_published_pages_outlive_their_sequence_and_the_tail_is_evicted_first() -> None:
    pool = PagePool(4)
    filled(pool, list(range(16))).release()
    assert pool.available == 4
    pool.take()
    survivor = PageTable(pool, 4)
    assert survivor.adopt([*range(16), 16]) == 12
    pool.check()


def test_shrinking_drops_pages_of_rejected_drafts() -> None:
    pool = PagePool(8)
    table = PageTable(pool, 4)
    table.reserve(14)
    table.shrink(5)
    assert len(table.pages) == 2
    assert pool.held == 2
    table.release()
    assert pool.held == 0


def test_two_sequences_may_compute_the_same_page() -> None:
    pool = PagePool(8)
    first, second = filled(pool, list(range(8))), filled(pool, list(range(8)))
    assert not set(first.pages) & set(second.pages)
    second.release()
    first.release()
    pool.check()
    assert pool.available == 8


def test_the_pool_touches_no_more_pages_than_were_needed_at_once() -> None:
    pool = PagePool(16)
    for _ in range(5):
        table = PageTable(pool, 4)
        table.reserve(12)
        table.release()
    assert pool.touched == 3
    filled(pool, list(range(8))).release()  # two cached pages stay findable, so others are used beside them
    table.reserve(12)
    assert pool.touched == 5


def test_drop_cached_forgets_every_idle_page() -> None:
    pool = PagePool(4)
    filled(pool, list(range(8))).release()
    pool.drop_cached()
    assert PageTable(pool, 4).adopt(list(range(9))) == 0
    pool.check()
