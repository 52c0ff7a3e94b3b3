"""Elastic buffers and the offload: every byte where it should be, and only what is missing moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import FaultyDisk, LazyTransfer, ShuffledTransfer
from offloaded import HEADS, LAYERS, World, raw_bytes
from outrider.errors import CapacityError
from outrider.memory.place import Elastic, Need
from outrider.memory.transfer import Transfer


def both(*rows):
    return np.array([rows, rows], np.int32)


# ---- set difference


def test_only_newcomers_are_loaded_and_they_take_the_evicted_rows():
    elastic = Elastic(2, 4)
    first = elastic.update(both(1, 3, 5, 7))
    assert first.rows.tolist() == [[0, 1, 2, 3]] * 2
    assert first.entries.tolist() == [1, 3, 5, 7] * 2
    second = elastic.update(both(1, 4, 5, 9))
    assert second.entries.tolist() == [4, 9] * 2
    assert second.new_rows.tolist() == [1, 3] * 2
    assert second.rows.tolist() == [[0, 1, 2, 3]] * 2
    assert second.heads.tolist() == [0, 0, 1, 1]
    assert len(elastic.update(both(1, 4, 5, 9)).entries) == 0


@given(st.lists(st.sets(st.integers(0, 40), max_size=9), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_rows_are_distinct_stable_and_loads_are_the_set_difference(steps):
    elastic, last = Elastic(1, 9), {}
    for wanted in steps:
        change = elastic.update(np.array([sorted(wanted)], np.int32).reshape(1, -1))
        now = dict(zip(sorted(wanted), change.rows[0].tolist(), strict=True))
        assert sorted(change.entries.tolist()) == sorted(wanted - set(last))
        assert all(now[e] == last[e] for e in wanted & set(last))
        assert len(set(now.values())) == len(wanted)
        assert all(0 <= row < 9 for row in now.values())
        assert [now[e] for e in change.entries.tolist()] == change.new_rows.tolist()
        last = now


def test_more_than_the_buffer_is_refused():
    with pytest.raises(CapacityError, match="lower the budget"):
        Elastic(2, 3).update(both(1, 2, 3, 4))


def test_find_knows_what_is_held():
    elastic = Elastic(2, 4)
    elastic.update(both(1, 3, 5))
    assert elastic.find(np.array([3, 5])).tolist() == [[1, 2]] * 2
    for absent in (2, 9):
        with pytest.raises(KeyError):
            elastic.find(np.array([absent]))


# ---- the offload


def movers():
    return [Transfer, LazyTransfer, lambda: ShuffledTransfer(5)]


@pytest.fixture(params=movers(), ids=["thread", "lazy", "shuffled"])
def mover(request):
    made = request.param()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_selected_entries_are_bitwise_what_was_written(mover, dtype):
    """Cold, resident and slow-tier hits are equal, for lengths that are no multiple of the page."""
    world = World(mover, dtype=dtype)
    for layer in (1, 2, 3):
        world.lower(layer)
    lives = [world.start(i, length) for i, length in enumerate((3, 17, 30))]
    for _ in range(12):
        assert not world.step(lives)
    assert world.checked > 1000
    for layer in (1, 2, 3):
        for life in lives:
            world.take(life, layer)
    assert mover.account.loads > 0
    assert mover.account.stores > 0


def test_a_selection_that_stays_moves_nothing():
    world = World(LazyTransfer())
    world.lower(3)
    life = world.start(0, 40)
    entries = world.choose(life, 14)
    world.offload.prepare([Need(0, life.table(), 40, 1, entries)]).finish()
    moved = world.mover.account.loaded_bytes
    assert moved > 0
    again = world.offload.prepare([Need(0, life.table(), 40, 1, entries)])
    again.finish()
    assert world.mover.account.loaded_bytes == moved


def test_a_shared_block_is_read_once():
    world = World(LazyTransfer())
    world.lower(3)
    parent = world.start(0, 24)
    child = world.start(1, 26, parent)
    entries = np.broadcast_to(np.array([0, 4, 5, *range(20, 24)], np.int32), (2, HEADS, 7))
    later = np.broadcast_to(np.array([0, 4, 5, 20, *range(22, 26)], np.int32), (2, HEADS, 8))
    needs = [Need(0, parent.table(), 24, 1, entries), Need(1, child.table(), 26, 1, later)]
    world.offload.elastic = False
    world.offload.prepare(needs).finish()
    blocks = world.mover.account.loaded_bytes // world.tier.block_bytes
    assert blocks == HEADS * 3  # pages 0, 1 and 5, each once per head


def test_rejected_rows_never_reach_the_tier():
    """Rejection at each position; pages hold accepted rows only."""
    for accepted in range(1, 5):
        world = World(Transfer())
        world.lower(3)
        life = world.start(0, 9)
        for _ in range(6):
            world.step([life], block=5, kept=np.arange(accepted, dtype=np.int32))
        world.mover.drain()
        world.take(life, 3)
        world.mover.close()


def test_a_trees_accepted_path_is_compacted():
    world = World(LazyTransfer())
    world.lower(2)
    life = world.start(0, 11)
    for kept in ([0, 2, 5], [1], [0, 1, 2, 3, 4, 5], [3, 4]):
        world.step([life], block=6, kept=np.array(kept, np.int32))
    world.take(life, 2)
    assert life.length == 11 + 12


@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
@pytest.mark.parametrize("elastic", [True, False])
def test_what_is_read_whole_is_staged_layer_by_layer(mover, ahead, elastic):
    """Beside sequences that read a selection, and whatever the look-ahead is."""
    world = World(mover)
    for layer in (3, 2, 1, 0):
        world.lower(layer)
    world.offload.ahead, world.offload.elastic = ahead, elastic
    lives = [world.start(i, length) for i, length in enumerate((33, 45, 26))]
    for whole in ((), (1,), (0, 2), (0, 1, 2), (), (2,)):
        assert not world.step(lives, whole=whole)
    assert world.staged == 7 * LAYERS * HEADS
    assert not world.lift(0)
    assert not world.step(lives, whole=(0,))


def test_without_look_ahead_nothing_moves_early():
    world = World(LazyTransfer())
    for layer in (3, 2):
        world.lower(layer)
    life = world.start(0, 40)
    world.offload.ahead = 0
    world.mover.drain()
    step = world.offload.prepare([Need(0, life.table(), 40, 1, world.choose(life, 14))])
    assert not world.mover._queue
    step.wait(2)
    assert world.mover.account.loads == 1


def test_layers_go_down_and_come_back_with_their_kv(mover):
    world = World(mover)
    lives = [world.start(i, 10 + 7 * i) for i in range(3)]
    for layer in (3, 2, 1):
        world.lower(layer)
        for _ in range(3):
            world.step(lives)
    for layer in (1, 2):
        world.lift(layer)
        world.step(lives)
    world.mover.drain()
    assert world.offload.layers == (3,)
    assert world.balance()[0] == world.balance()[1]


def test_ended_sequences_leave_nothing():
    world = World(Transfer())
    world.lower(2)
    world.lower(3)
    for round_ in range(4):
        for i in range(3):
            world.start(i, 13 + round_)
        world.step(list(world.lives.values()))
        for i in range(3):
            world.end(i)
    world.mover.drain()
    assert world.tier.held == 0
    assert world.offload.pages.in_flight == 0
    assert len(world.free) == 60
    world.mover.close()


def test_too_many_sequences_and_too_large_passes_are_refused():
    world = World(LazyTransfer())
    world.lower(3)
    for i in range(3):
        world.start(i, 5)
    with pytest.raises(CapacityError, match="max_num_seqs"):
        world.start(3, 5)
    del world.lives[3]
    with pytest.raises(CapacityError, match="21 rows"):
        world.step([world.lives[0], world.lives[1], world.lives[2]], block=7)


def test_a_window_smaller_than_a_page_is_refused_loudly():
    world = World(LazyTransfer())
    world.lower(3)
    life = world.start(0, 19)
    gone = np.broadcast_to(np.array([0, 1, 18], np.int32), (2, HEADS, 3))
    world.offload.prepare([Need(0, life.table(), 19, 1, gone)]).finish()
    back = np.broadcast_to(np.array([0, 1, 17], np.int32), (2, HEADS, 3))
    with pytest.raises(CapacityError, match="set window to 4 or more"):
        world.offload.prepare([Need(0, life.table(), 19, 1, back)])


# ---- faults


@pytest.fixture
def faulty(tmp_path):
    tier = FaultyDisk(tmp_path, raw_bytes(), LAYERS * 60 * HEADS)
    world = World(Transfer(), tier)
    world.lower(2)
    world.lower(3)
    for i in range(3):
        world.start(i, 30)
    world.mover.drain()
    world.offload.elastic = False  # what the beginning left in the buffers would hide what is lost
    yield world
    world.mover.close()
    tier.close()


def test_a_corrupt_block_costs_only_the_request_that_wanted_it(faulty):
    lives = list(faulty.lives.values())
    for page in lives[1].pages[:6]:
        for head in range(HEADS):
            faulty.tier.flip((3 * 60 + page) * HEADS + head)
    assert faulty.step(lives) == {1}
    faulty.end(1)
    for _ in range(5):
        assert not faulty.step([lives[0], lives[2]])


def test_a_lost_request_is_recomputed_and_goes_on(faulty):
    lives = list(faulty.lives.values())
    faulty.tier.flip((2 * 60 + lives[0].pages[0]) * HEADS)
    assert faulty.step(lives) == {0}
    faulty.offload.release(0)
    faulty.put(lives[0])
    for _ in range(5):
        assert not faulty.step(lives)


def test_a_failing_read_fails_everybody_who_reads_and_nobody_else(faulty):
    lives = list(faulty.lives.values())
    faulty.tier.read_error = True
    assert faulty.step(lives[:2]) == {0, 1}
    faulty.tier.read_error = False
    assert faulty.tier.hits > 0
    assert not faulty.step(lives[2:])


def test_a_full_disk_ends_the_request_whose_pages_it_could_not_take(faulty):
    lives = list(faulty.lives.values())
    faulty.tier.full_after = 0
    steps = [faulty.step(lives[:1], block=3, kept=np.arange(3, dtype=np.int32)) for _ in range(4)]
    while not steps[-1]:
        steps.append(faulty.step(lives[:1]))
    assert steps[-1] == {0}
    assert "No space left" in str(faulty.offload.pages.trouble)
    assert faulty.mover.account.failures > 0
    faulty.end(0)
    for _ in range(3):
        assert not faulty.step(lives[1:], kept=np.zeros(0, np.int32))


def test_a_slow_disk_is_only_slow(faulty):
    faulty.tier.delay = 0.002
    lives = list(faulty.lives.values())
    for _ in range(3):
        assert not faulty.step(lives)
    assert faulty.mover.account.exposed_seconds > 0.01


def test_a_layer_that_the_disk_has_no_room_for_stays(faulty):
    faulty.tier.full_after = 0
    held = faulty.tier.held
    with pytest.raises(CapacityError, match="No space left"):
        faulty.lower(1)
    faulty.mover.drain()
    assert faulty.offload.layers == (2, 3)
    assert faulty.tier.held == held


def test_a_layer_comes_back_without_what_is_lost(faulty):
    lives = list(faulty.lives.values())
    faulty.tier.flip((2 * 60 + lives[0].pages[0]) * HEADS)
    assert faulty.lift(2) == {lives[0].pages[0]}


def test_short_reads_and_writes_change_nothing(faulty):
    faulty.tier.short = True
    for _ in range(4):
        assert not faulty.step(list(faulty.lives.values()))
    assert faulty.tier.hits > 10
