"""The transfer thread: order, tickets, errors and the account."""

import threading
import time

import numpy as np
import pytest

from faults import LazyTransfer, ShuffledTransfer
from outrider.errors import TransferError
from outrider.memory.transfer import Transfer


def numbers(*blocks):
    return np.array(blocks, np.int64)


@pytest.fixture
def transfer():
    made = Transfer()
    yield made
    made.close()
    made.close()


def test_jobs_run_in_order_and_are_accounted(transfer):
    seen = []
    for i in range(20):
        transfer.submit("load" if i % 2 else "store", numbers(i), lambda i=i: seen.append(i) or 10)
    transfer.drain()
    assert seen == list(range(20))
    account = transfer.account
    assert (account.loads, account.stores, account.loaded_bytes, account.stored_bytes) == (10, 10, 100, 100)
    assert account.failures == 0


def test_waiting_is_exposed_and_the_rest_is_hidden(transfer):
    tickets = [transfer.submit("load", numbers(i), lambda: time.sleep(0.03) or 1) for i in range(3)]
    time.sleep(0.045)
    for ticket in tickets:
        transfer.wait(ticket)
    transfer.wait(tickets[0])
    account = transfer.account
    assert account.busy_seconds >= 0.09
    assert 0.02 < account.exposed_seconds < account.busy_seconds


def test_an_error_reaches_its_own_waiters_only(transfer):
    def fail():
        raise TransferError("lost")

    bad, good = transfer.submit("load", numbers(1), fail), transfer.submit("load", numbers(2), lambda: 7)
    transfer.wait(good)
    for _ in range(2):
        with pytest.raises(TransferError, match="lost"):
            transfer.wait(bad)
    assert transfer.account.failures == 1
    assert transfer.account.loaded_bytes == 7


def test_a_full_queue_holds_back_whoever_submits():
    transfer, gate = Transfer(depth=2), threading.Event()
    transfer.submit("store", numbers(0), lambda: gate.wait() and 0)
    time.sleep(0.01)
    done = []
    pusher = threading.Thread(
        target=lambda: [transfer.submit("store", numbers(i), lambda: 0) for i in range(5)] and done.append(1)
    )
    pusher.start()
    time.sleep(0.03)
    assert not done
    gate.set()
    pusher.join(5)
    assert done
    transfer.close()
    assert transfer.account.stores == 6
    assert transfer.account.exposed_seconds > 0.01


def test_closing_finishes_what_is_queued_and_refuses_more():
    transfer, seen = Transfer(), []
    for i in range(5):
        transfer.submit("store", numbers(i), lambda i=i: time.sleep(0.002) or seen.append(i) or 0)
    transfer.close()
    assert seen == list(range(5))
    with pytest.raises(TransferError, match="closed"):
        transfer.submit("load", numbers(0), lambda: 0)


@pytest.mark.parametrize("make", [Transfer, lambda: ShuffledTransfer(3), LazyTransfer])
def test_jobs_on_the_same_block_keep_their_order_in_every_mover(make):
    mover, seen = make(), {0: [], 1: [], 2: []}
    tickets = [mover.submit("store", numbers(i % 3), lambda i=i: seen[i % 3].append(i) or 0) for i in range(60)]
    for ticket in reversed(tickets):
        mover.wait(ticket)
    assert all(part == sorted(part) and len(part) == 20 for part in seen.values())
    mover.close()


def test_the_shuffled_one_does_reorder():
    mover, seen = ShuffledTransfer(1), []
    for i in range(40):
        mover.submit("load", numbers(i), lambda i=i: seen.append(i) or 0)
    mover.drain()
    mover.close()
    assert sorted(seen) == list(range(40)) != seen
    assert mover.reordered > 5
