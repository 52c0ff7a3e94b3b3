"""The suffix automaton that the `suffix` drafter uses: as in automaton.py, in arrays that compiled code walks.

A prompt of a thousand tokens takes it a tenth of a millisecond, where lists and dictionaries take ten; with many short
answers at once that is the difference between a drafter that is free and one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.drafters.automaton import ROOT
from outrider.errors import DrafterError
from outrider.kernels.cpu import suffixes
from outrider.types import Int32

_FIRST_ROOM = 128  # tokens
_STATES, _EDGES = 2, 3  # per token at most, and one of each
_LOAD = 2  # slots of the table per edge at least


class SuffixIndex:
    """All substrings of the texts fed to it, and how often each occurred. Matches are (state, length)."""

    def __init__(self) -> None:
        self.size = 0  # tokens fed
        self._meta = np.zeros(4, np.int64)
        self._meta[suffixes.STATES] = 1
        self._room = 0
        self._states, self._edges = np.zeros((1, 5), np.int32), np.zeros((0, 4), np.int32)
        self._states[ROOT] = (-1, 0, 0, -1, -1)
        self._fit(_FIRST_ROOM)

    def extend(self, tokens: Sequence[int] | Int32) -> None:
        """Append tokens to the current text."""
        self._fit(self.size + len(tokens))
        suffixes.extend(self._states, self._edges, self._table, self._meta, np.asarray(tokens, np.int32))
        if self._meta[suffixes.FULL]:
            raise DrafterError(f"a suffix automaton of {self._room} tokens is full")
        self.size += len(tokens)

    def restart(self) -> None:
        """The current text has ended; the next token begins another."""
        self._meta[suffixes.CURRENT] = ROOT

    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the current text that also ended elsewhere."""
        state = max(int(self._states[self._meta[suffixes.CURRENT], suffixes.LINK]), ROOT)
        return state, int(self._states[state, suffixes.LENGTH])

    def follow(self, state: int, length: int, tokens: Sequence[int] | Int32) -> tuple[int, int]:
        """The longest suffix of a matched string and the tokens behind it that occurs; (ROOT, 0) for none."""
        fresh = np.asarray(tokens, np.int32)
        state, length = suffixes.follow(self._states, self._edges, self._table, state, length, fresh)
        return int(state), int(length)

    def settle(self, state: int, length: int) -> int:
        """The state that stands for a matched string now: clones may have taken over the shorter ones."""
        return int(suffixes.settle(self._states, state, length))

    def descend(self, state: int, depth: int) -> tuple[list[int], list[float]]:
        """The most frequent continuation of a state, and each token's share among what followed there."""
        tokens, shares = np.empty(depth, np.int32), np.empty(depth, np.float64)
        count = suffixes.descend(self._states, self._edges, state, tokens, shares)
        return tokens[:count].tolist(), shares[:count].tolist()

    def _fit(self, tokens: int) -> None:
        """Make room for so many tokens."""
        if tokens <= self._room:
            return
        self._room = max(tokens, 2 * self._room)
        states, edges = (
            np.empty((_STATES * self._room + 2, 5), np.int32),
            np.empty((_EDGES * self._room + 3, 4), np.int32),
        )
        states[: len(self._states)], edges[: len(self._edges)] = self._states, self._edges
        self._states, self._edges = states, edges
        self._table = np.zeros(1 << (_LOAD * len(edges) - 1).bit_length(), np.int32)
        suffixes.rehash(edges, self._meta[suffixes.EDGES], self._table)
