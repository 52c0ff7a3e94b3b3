"""What the `head` drafter keeps: a sequence's slots, the states that wait for theirs, and the slots of ended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from outrider.models.head import Entries, Job
from outrider.types import Float32


class HeadState:
    """One sequence: the slots computed so far, and states of committed positions that wait for their next token."""

    def __init__(self, entries: Entries, start: int) -> None:
        self.entries = entries
        self.start = start  # position of the first slot
        self.following = start  # position behind the last waiting state
        self.tokens: list[int] = []  # known from `start` on; slot t was computed with token t + 1
        self._waiting: list[Float32] = []  # [rows, taps * hidden]

    @property
    def backlog(self) -> int:
        """States that wait."""
        return self.following - self.start - self.entries.count

    @property
    def begun(self) -> bool:
        """Whether it is known where the slots begin: those of a prompt's cached part may still be found."""
        return self.start == 0 or self.entries.count > 0

    def add(self, tokens: Sequence[int], features: Float32) -> None:
        """States [taps, rows, hidden] of committed tokens that follow the known ones."""
        self._waiting.append(features.transpose(1, 0, 2).reshape(len(tokens), -1))
        self.following += len(tokens)
        del self.tokens[self.following - self.start - len(tokens) :]
        self.tokens += tokens

    def pass_over(self, recall: int) -> None:
        """Keep the last so many waiting states only, and begin anew with them."""
        self._waiting = [self._rows()[-recall:].copy()]  # a copy: a view would hold on to all of them
        self.entries, self.start = self.entries.first(0), self.following - recall
        del self.tokens[:-recall]

    def begin(self, tokens: Sequence[int], archive: Archive) -> None:
        """Before the first slots: find those of the cached part of a prompt, or do without them."""
        if self.begun:
            return
        found = archive.find(tokens, self.start)
        if found is not None:
            self.entries, self.start, self.tokens = found, 0, list(tokens[: self.following])

    def job(self, tokens: Sequence[int], depth: int) -> Job:
        """All waiting rows, to draft behind the last one."""
        first = self.start + self.entries.count
        return Job(self.entries, self._rows(), tokens[first + 1 : self.following + 1], first, depth)

    def catch_up(self) -> Job:
        """All waiting rows but the last, whose next token is not known yet; they draft nothing."""
        rows, first = self._rows(), self.start + self.entries.count
        self._waiting = [rows[-1:]]
        return Job(self.entries, rows[:-1], self.tokens[self.entries.count + 1 :], first, 0)

    def keep(self, tokens: Sequence[int]) -> None:
        """A job is done: its rows need not wait any longer."""
        self._waiting = []
        self.tokens += tokens[self.start + len(self.tokens) :]

    def _rows(self) -> Float32:
        return self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)


class Archive:
    """Slots of ended sequences, the latest first to be found and the last to be dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, tuple[list[int], Entries]] = OrderedDict()
        self._next = 0
        self.tokens = 0  # slots held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, state: HeadState) -> None:
        """Keep the slots of an ended sequence that began at the first token."""
        count = state.entries.count
        if not 0 < count <= self._capacity or state.start > 0:
            return
        self._held[self._next] = (state.tokens, state.entries)
        self._next += 1
        self.tokens += count
        while self.tokens > self._capacity:
            _, (_, entries) = self._held.popitem(last=False)
            self.tokens -= entries.count

    def find(self, tokens: Sequence[int], slots: int) -> Entries | None:
        """The first `slots` slots of a sequence that begins like `tokens`; slot t needs token t + 1."""
        wanted = list(tokens[: slots + 1])
        for known, entries in reversed(self._held.values()):
            if known[: slots + 1] == wanted and entries.count >= slots:
                return entries.first(slots)
        return None
