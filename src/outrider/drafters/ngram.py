"""Lookup drafting: what followed the last time these tokens were seen in the same sequence?

Prompt lookup decoding (Saxena 2023; "n-gram" in vLLM). The longest n-gram that ends the sequence is looked up, its
latest earlier occurrence wins, and what followed is proposed. Rarely right at first but then right for long, so it
drafts only on a match and then as far as it may. It holds one hash index per sequence: O(max_n) per token, no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.hits import HitRates
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Draft

_TOKEN_BITS = 21  # token ids are packed into one integer key; vocabularies stay below two million


@dataclass(frozen=True)
class NgramOptions:
    """Options of the `ngram` drafter."""

    max_n: int = 4  # tokens of the longest n-gram looked up
    min_n: int = 2  # tokens of the shortest; 1 drafts nearly always and is seldom right

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n <= 16:
            raise ConfigError("ngram: use 1 <= min_n <= max_n <= 16", "min_n")


@dataclass
class _Index:
    """Where the continuation of every n-gram of one sequence was last seen."""

    seen: int = 0  # tokens indexed so far
    latest: dict[int, int] = field(default_factory=dict)  # packed n-gram -> index of the token that followed
    matched: int = 0  # n of the match behind the open draft
    guess: tuple[int, ...] = ()  # the open draft


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
            index = self._indices[context.sequence_id] = _Index()
        self._extend(index, context.tokens)
        length, start = self._match(index, context.tokens)
        index.matched, index.guess = length, ()
        if depth <= 0 or length == 0:
            return NO_DRAFT
        index.guess = tokens = unroll(context.tokens, start, depth)
        return Draft(tokens, drafter=self.name, confidence=self._rates.confidence(length, depth))

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index every n-gram whose following token is known."""
        low, high, latest = self.options.min_n, self.options.max_n, index.latest
        for end in range(max(index.seen, 1), len(tokens)):
            key, shift = 0, 0
            for n in range(1, min(high, end) + 1):
                key |= (tokens[end - n] + 1) << shift
                shift += _TOKEN_BITS
                if n >= low:
                    latest[key] = end
        index.seen = len(tokens)

    def _match(self, index: _Index, tokens: Sequence[int]) -> tuple[int, int]:
        """(n, index of the continuation) of the longest n-gram that ends `tokens` and was seen before; (0, 0): none."""
        best, key, shift = (0, 0), 0, 0
        for n in range(1, min(self.options.max_n, len(tokens)) + 1):
            key |= (tokens[-n] + 1) << shift
            shift += _TOKEN_BITS
            if n >= self.options.min_n:
                start = index.latest.get(key)
                if start is None:
                    break  # a longer n-gram cannot have been seen when a shorter one was not
                best = (n, start)
        return best


def unroll(tokens: Sequence[int], start: int, depth: int) -> tuple[int, ...]:
    """`depth` tokens from `start` on; past the end the copy reads what it has just written, as in LZ77."""
    known = tuple(tokens[start : start + depth])
    period = len(tokens) - start
    return known if len(known) == depth else tuple(known[i % period] for i in range(depth))
