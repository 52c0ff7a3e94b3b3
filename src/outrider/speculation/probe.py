"""When something that rests is tried again: at growing intervals."""

from __future__ import annotations


class Probe:
    """Counts idle rounds; due for two rounds at growing intervals.

    Two, because in the first one a drafter may have to catch up with what was decoded while it rested.
    """

    __slots__ = ("_again", "_idle", "_interval")

    def __init__(self, interval: int) -> None:
        self._idle, self._interval, self._again = 0, interval, False

    def due(self, last: int) -> bool:
        """One more idle round: is it one for probing? `last` is the longest interval."""
        if self._again:
            self._again = False
            return True
        self._idle += 1
        if self._idle < self._interval:
            return False
        self._idle, self._interval, self._again = 0, min(2 * self._interval, last), True
        return True


class Rest:
    """After `patience` idle rounds in a row, whole rounds are left out: 1, 2, 4, ... up to `longest` between two."""

    __slots__ = ("_idle", "_left", "_length", "_longest", "_patience")

    def __init__(self, patience: int, longest: int) -> None:
        self._patience, self._longest = patience, longest
        self._idle = self._left = self._length = 0

    def resting(self) -> bool:
        """One more round: is it left out?"""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def count(self) -> None:
        """An idle round."""
        self._idle += 1
        if self._idle >= self._patience:
            self._length = min(max(1, 2 * self._length), self._longest)
            self._left = self._length

    def end(self) -> None:
        """A round that was of use."""
        self._idle = self._left = self._length = 0
