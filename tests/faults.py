"""Tiers and transfers that misbehave on purpose."""

import errno
import os
import random
import time
from collections import deque

import numpy as np

from outrider.memory.tiers import DiskTier
from outrider.memory.transfer import Account, Ticket, Transfer


class FaultyDisk(DiskTier):
    """A disk that can be slow, short, full or broken; counts what it did to its caller."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.delay, self.short, self.ends_early, self.full_after = 0.0, False, False, None
        self.read_error = False
        self.hits = 0

    def flip(self, block, offset=3):
        """Change one byte of a block behind the tier's back."""
        at = block * self.block_bytes + offset
        byte = os.pread(self._fd, 1, at)[0]
        os.pwrite(self._fd, bytes([byte ^ 0x40]), at)

    def undo(self, block, old):
        """Put an older, once valid content back: a write that was lost."""
        os.pwrite(self._fd, bytes(old), block * self.block_bytes)

    def _read_fast(self, blocks, out, got):
        """Nothing arrives at the first try while something is wrong."""
        if not (self.delay or self.short or self.ends_early or self.read_error):
            super()._read_fast(blocks, out, got)

    def _pread(self, view, offset):
        time.sleep(self.delay)
        if self.read_error:
            self.hits += 1
            raise OSError(errno.EIO, "Input/output error")
        if self.ends_early:
            self.hits += 1
            return 0
        if self.short and len(view) > 1:
            self.hits += 1
            view = view[: len(view) // 2]
        return super()._pread(view, offset)

    def _pwrite(self, view, offset):
        time.sleep(self.delay)
        if self.full_after is not None:
            if self.full_after <= 0:
                self.hits += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            self.full_after -= 1
        if self.short and len(view) > 1:
            self.hits += 1
            view = view[: len(view) // 2]
        return super()._pwrite(view, offset)


def conflicts(queue, index):
    """Whether an earlier queued job touches a block of this one."""
    mine = queue[index][1]
    return any(np.intersect1d(mine, queue[i][1]).size for i in range(index))


class ShuffledTransfer(Transfer):
    """The real thread, with jobs delayed and reordered at random as far as the contract allows."""

    def __init__(self, seed, longest=0.0005):
        self._random = random.Random(seed)
        self._longest = longest
        self.reordered = 0
        super().__init__(depth=64)

    def _pick(self):
        free = [i for i in range(len(self._queue)) if not conflicts(self._queue, i)]
        index = self._random.choice(free)
        self.reordered += index > 0
        return index

    def _perform(self, kind, blocks, job, ticket):
        time.sleep(self._random.random() * self._longest)
        super()._perform(kind, blocks, job, ticket)


class LazyTransfer:
    """Runs a job only when somebody waits for it, after the earlier ones that touch its blocks, and nothing else.

    Whoever reads what a load writes without waiting on its ticket reads something else: every time, not sometimes.
    """

    def __init__(self):
        self.account = Account()
        self._queue = deque()

    def submit(self, kind, blocks, job):
        ticket = Ticket()
        self._queue.append((kind, blocks, job, ticket))
        return ticket

    def submit_all(self, kind, jobs):
        return [self.submit(kind, *job) for job in jobs]

    def wait(self, ticket):
        if not ticket.done:
            self._run_upto(next(i for i, queued in enumerate(self._queue) if queued[3] is ticket))
        ticket.join()

    def drain(self):
        while self._queue:
            self._run(0)

    def close(self):
        self.drain()

    def _run_upto(self, index):
        ticket = self._queue[index][3]
        while conflicts(self._queue, index := [q[3] for q in self._queue].index(ticket)):
            mine = self._queue[index][1]
            self._run_upto(next(i for i in range(index) if np.intersect1d(mine, self._queue[i][1]).size))
        self._run(index)

    def _run(self, index):
        kind, _, job, ticket = self._queue[index]
        del self._queue[index]
        try:
            moved = job()
        except Exception as error:
            self.account.failures += 1
            ticket.settle(error)
            return
        if kind == "load":
            self.account.loads += 1
            self.account.loaded_bytes += moved
        else:
            self.account.stores += 1
            self.account.stored_bytes += moved
        ticket.settle()
