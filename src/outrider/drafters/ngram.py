"""Lookup drafting: what followed the last time these tokens were seen in the same sequence?

Prompt lookup decoding (Saxena 2023; "n-gram" in vLLM). The longest n-gram that ends the sequence is looked up, its
latest earlier occurrence wins, and what followed is proposed. Rarely right at first but then right for long, so it
drafts only on a match and then as far as it may. It holds one hash index per sequence: O(max_n) per token, no model,
and compiled, since a prompt is read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.hits import HitRates
from outrider.errors import ConfigError
from outrider.kernels.cpu.ngrams import read_and_match
from outrider.types import NO_DRAFT, Draft

_FIRST_ROOM = 256  # tokens


@dataclass(frozen=True)
class NgramOptions:
    """Options of the `ngram` drafter."""

    max_n: int = 4  # tokens of the longest n-gram looked up
    min_n: int = 2  # tokens of the shortest; 1 drafts nearly always and is seldom right

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n <= 16:
            raise ConfigError("ngram: use 1 <= min_n <= max_n <= 16", "min_n")


class _Index:
    """Where the continuation of every n-gram of one sequence was last seen."""

    def __init__(self, low: int, high: int) -> None:
        self.seen = 0  # tokens read so far
        self.matched = 0  # n of the match behind the open draft
        self.guess: tuple[int, ...] = ()  # the open draft
        self._low, self._sizes = low, high - low + 1
        self._text = np.empty(0, np.int32)

    def read(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Index what is new of a sequence; (n, index of the continuation) of its longest known end, (0, 0): none."""
        start, stop = self.seen, len(tokens)
        if stop > len(self._text):
            start = self._grow(stop)
        self._text[self.seen : stop] = tokens[self.seen :]
        self.seen = stop
        length, found = read_and_match(self._text, start, stop, self._low, self._tables)
        return int(length), int(found)

    def _grow(self, tokens: int) -> int:
        """Room for so many tokens, and empty tables: where to index from."""
        text = np.empty(max(_FIRST_ROOM, 2 * tokens), np.int32)
        text[: self.seen] = self._text[: self.seen]
        self._text = text
        self._tables = np.zeros((self._sizes, 1 << (2 * len(text) - 1).bit_length()), np.int32)
        return 0


class NgramDrafter:
    """Proposes the continuation of the latest occurrence of the longest matching n-gram."""

    name = "ngram"
    needs: frozenset[Need] = frozenset()
    Options = NgramOptions

    def __init__(self, options: NgramOptions = NgramOptions()) -> None:
        self.options = options
        self._indices: dict[int, _Index] = {}
        self._rates = HitRates()

    @classmethod
    def build(cls, options: NgramOptions, host: object) -> NgramDrafter:
        """A drafter whose index is compiled already: not in the middle of the first answer."""
        _Index(options.min_n, options.max_n).read([0, 1, 0])
        return cls(options)

    @property
    def held(self) -> Collection[int]:
        """Sequences that something is held for."""
        return self._indices.keys()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        return [self._guess(context, depth) for context, depth in zip(contexts, depths, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            index = self._indices.get(seen.sequence_id)
            if index and index.guess and seen.verdict.tokens:
                self._rates.learn(index.matched, index.guess, seen.verdict.tokens)
                index.guess = ()

    def forget(self, sequence_id: int) -> None:
        self._indices.pop(sequence_id, None)

    def _guess(self, context: Context, depth: int) -> Draft:
        index = self._indices.get(context.sequence_id)
        if index is None or index.seen > len(context.tokens):
            index = self._indices[context.sequence_id] = _Index(self.options.min_n, self.options.max_n)
        length, start = index.read(context.tokens)
        index.matched, index.guess = length, ()
        if depth <= 0 or length == 0:
            return NO_DRAFT
        index.guess = tokens = unroll(context.tokens, start, depth)
        return Draft(tokens, drafter=self.name, confidence=self._rates.confidence(length, depth))


def unroll(tokens: Sequence[int], start: int, depth: int) -> tuple[int, ...]:
    """`depth` tokens from `start` on; past the end the copy reads what it has just written, as in LZ77."""
    known = tuple(tokens[start : start + depth])
    period = len(tokens) - start
    return known if len(known) == depth else tuple(known[i % period] for i in range(depth))
