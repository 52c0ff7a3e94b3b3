"""What a step waits for, and the compiled copies behind it: as the plain ones would have it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offloaded import as_bytes, planes
from outrider.memory.place.buffers import Rows, copy_layers
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.loads import Loads, Wanted
from outrider.memory.place.step import Ahead, Job, Step
from outrider.memory.transfer import Account, Ticket

LAYERS = (2, 3, 4, 5)


class Clerk:
    """A mover whose jobs end when the test says so."""

    def __init__(self):
        self.account, self.tickets, self.waited = Account(), {}, []

    def submit_all(self, kind, jobs):
        new = [Ticket() for _ in jobs]
        self.tickets.update(zip((int(job.blocks[0]) for job in jobs), new, strict=True))
        return new

    def wait(self, ticket):
        self.waited += [layer for layer, known in self.tickets.items() if known is ticket]
        assert ticket.done
        ticket.join()


def queue(clerk, depth, layers=LAYERS):
    jobs = {layer: Job(np.array([layer]), lambda: 0) for layer in layers}
    return Ahead(clerk, LAYERS, jobs, depth)


def flat(arrays):
    """All bytes of a layer (a copy)."""
    return np.concatenate([view.ravel() for view in as_bytes(arrays)])


def test_layers_whose_loads_are_there_run_together():
    clerk = Clerk()
    ahead = queue(clerk, None)
    for layer in (2, 3):
        clerk.tickets[layer].settle()
    assert ahead.reach(2) == 4
    for layer in (4, 5):
        clerk.tickets[layer].settle()
    assert ahead.reach(4) == 6
    assert clerk.waited == [2, 3, 4]
    assert ahead.reach(5) == 6
    assert clerk.waited == [2, 3, 4, 5]


def test_layers_that_load_nothing_are_no_reason_to_stop():
    clerk = Clerk()
    ahead = queue(clerk, None, layers=(2, 5))
    clerk.tickets[2].settle()
    assert ahead.reach(2) == 5


def test_a_limited_look_ahead_goes_on_layer_by_layer():
    clerk = Clerk()
    ahead = queue(clerk, 1)
    assert list(clerk.tickets) == [2]
    clerk.tickets[2].settle()
    assert ahead.reach(2) == 3
    assert list(clerk.tickets) == [2, 3]


def test_a_step_stops_where_any_of_its_queues_does():
    clerk, other = Clerk(), Clerk()
    step = Step((), [queue(clerk, None), queue(other, None, layers=(3,))], set(), LAYERS)
    for layer in LAYERS:
        clerk.tickets[layer].settle()
    assert step.reach(2) == 3
    other.tickets[3].settle()
    assert step.reach(3) == 6
    assert step.finish() == frozenset()


def test_many_layers_are_copied_like_each_alone():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "int8"):
        made = [[planes(4, dtype) for _ in range(3)] for _ in range(3)]
        for part in made:
            for arrays in part:
                for array in arrays:
                    array.view(np.uint8)[:] = rng.integers(0, 256, array.view(np.uint8).shape)
        sources, targets, plain = made
        for mine, other in zip(plain, targets, strict=True):
            for array, same in zip(mine, other, strict=True):
                array[:] = same
        heads, size = sources[0][0].shape[1], sources[0][0].shape[2]
        which = np.repeat(np.arange(heads, dtype=np.int32), 5)
        slots = rng.permutation(4 * size)[: 5 * heads].astype(np.int32)
        places = np.stack([rng.permutation(4 * size)[: 5 * heads] for _ in range(2)]).astype(np.int32)
        groups = np.array([0, 1, 0], np.int32)
        rows = [[Rows(arrays) for arrays in part] for part in (targets, sources)]
        before = flat(targets[1])
        copy_layers(rows[0], rows[1], groups, which, slots, places)
        for layer, arrays in enumerate(plain):
            Rows(arrays).copy(rows[1][layer], which, slots, places[groups[layer]])
            np.testing.assert_array_equal(flat(targets[layer]), flat(arrays))
        assert (flat(targets[1]) != before).any()


@given(st.sets(st.integers(0, 30), max_size=6), st.sets(st.integers(0, 30), max_size=6), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_entries_at_the_end_take_the_rows_that_an_update_gives_them(first, second, count):
    fast, slow = Elastic(2, 8), Elastic(2, 8)
    for wanted in (first, second):
        both = np.array([sorted(wanted)] * 2, np.int32).reshape(2, -1)
        fast.update(both)
        slow.update(both)
    new = np.arange(40, 40 + count, dtype=np.int32)
    held = np.concatenate([slow.entries, np.tile(new, (2, 1))], axis=1)[:, -8:]
    change = slow.update(held)
    np.testing.assert_array_equal(fast.append(new), change.rows[:, held.shape[1] - count :])
    np.testing.assert_array_equal(fast.entries, slow.entries)
    np.testing.assert_array_equal(fast.rows, slow.rows)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_wants_are_sorted_by_block_and_a_block_is_named_once(wants):
    blocks = np.array([block for block, _ in wants], np.int64)
    offsets = np.array([offset for _, offset in wants], np.int32)
    slots = np.arange(len(wants), dtype=np.int32)
    loads = Loads.join([Wanted(blocks, offsets, np.zeros_like(slots), slots, 7)])
    assert loads.blocks.tolist() == sorted(set(blocks.tolist()))
    for i, block in enumerate(loads.blocks):
        part = slice(loads.starts[i], loads.starts[i + 1])
        assert loads.slots[part].tolist() == np.flatnonzero(blocks == block).tolist()
        assert loads.offsets[part].tolist() == offsets[blocks == block].tolist()
    assert loads.starts[-1] == len(wants)
