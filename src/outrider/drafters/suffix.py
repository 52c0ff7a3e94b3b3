"""Suffix drafting: the longest suffix seen before, in this sequence or in past answers, continued by frequency.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), on suffix automata instead of suffix trees. Every sequence has
an index over its prompt and output; one shared memory holds past outputs of the server, which repeat each other
more than one expects (agents, templates, retries). The shared memory forgets by generations: it holds at least
`shared_tokens / 2` of the latest output tokens and never more than `shared_tokens`.

Answers drafted from other users' outputs are verified like any draft; what they can leak is timing. Switch the shared
memory off (`shared_tokens: 0`) where even that matters.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.drafters.automaton import ROOT
from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.hits import HitRates
from outrider.drafters.suffix_index import SuffixIndex
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Draft, Int32

_RETURNING = 256  # forgotten sequences that may come back, as preempted ones do
_LEARN_PER_CALL = 64  # past output tokens taken into the shared memory per step, so that no step stalls


@dataclass(frozen=True)
class SuffixOptions:
    """Options of the `suffix` drafter."""

    min_match: int = 2  # tokens a match needs
    reach: float = 4.0  # tokens drafted per token matched, at most
    sequence_tokens: int = 32768  # latest tokens of a sequence that are indexed (about 0.2 KiB each)
    shared_tokens: int = 65536  # tokens of past outputs that are remembered; 0: none

    def __post_init__(self) -> None:
        if self.min_match < 1 or not self.reach > 0 or self.sequence_tokens < 2 or self.shared_tokens < 0:
            raise ConfigError(
                "suffix: use min_match from 1, reach above 0, sequence_tokens from 2 and shared_tokens from 0",
                "drafters",
            )


@dataclass
class _Match:
    """Where a sequence's latest tokens are in an automaton that does not hold the sequence itself."""

    index: SuffixIndex
    state: int = ROOT
    length: int = 0

    def follow(self, tokens: Int32) -> None:
        """Read on."""
        self.state, self.length = self.index.follow(self.state, self.length, tokens)


@dataclass
class _Tracked:
    """One sequence: its own automaton, its matches in the shared memory, and how much of it was read."""

    context: Context
    own: SuffixIndex = field(default_factory=SuffixIndex)
    matches: list[_Match] = field(default_factory=list)
    seen: int = 0
    matched: int = 0  # length of the match behind the open draft
    guess: tuple[int, ...] = ()  # the open draft
    given: int = 0  # tokens of its output that the shared memory has already


class SuffixDrafter:
    """Continues the longest suffix that occurred before with what followed it most often."""

    name = "suffix"
    needs: frozenset[Need] = frozenset()
    Options = SuffixOptions

    def __init__(self, options: SuffixOptions | None = None) -> None:
        self.options = options or SuffixOptions()
        self._tracked: dict[int, _Tracked] = {}
        self._shared = _SharedMemory(self.options.shared_tokens)
        self._rates = HitRates()
        self._given: OrderedDict[int, int] = OrderedDict()  # latest forgotten sequences -> output tokens remembered

    @classmethod
    def build(cls, options: SuffixOptions, host: object) -> SuffixDrafter:
        """A drafter whose index is compiled already: not in the middle of the first answer."""
        index = SuffixIndex()
        index.extend([0, 1, 0])
        index.descend(index.settle(*index.follow(ROOT, 0, [0, 1])), 1)
        return cls(options)

    @property
    def held(self) -> Collection[int]:
        """Sequences that something is held for."""
        return self._tracked.keys()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        self._shared.digest()
        return [self._guess(context, depth) for context, depth in zip(contexts, depths, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            tracked = self._tracked.get(seen.sequence_id)
            if tracked and tracked.guess and seen.verdict.tokens:
                self._rates.learn(tracked.matched, tracked.guess, seen.verdict.tokens)
                tracked.guess = ()

    def forget(self, sequence_id: int) -> None:
        """The output goes into the shared memory, a little with every step to come.

        A preempted sequence is forgotten too and comes back: what was remembered of it is not remembered again.
        """
        tracked = self._tracked.pop(sequence_id, None)
        if tracked is None:
            return
        output = tracked.context.tokens[tracked.context.prompt_length :]
        self._shared.add(output[tracked.given :])
        self._given[sequence_id] = len(output)
        if len(self._given) > _RETURNING:
            self._given.popitem(last=False)

    def _guess(self, context: Context, depth: int) -> Draft:
        tracked = self._track(context)
        index, state, length = self._longest(tracked)
        tracked.matched, tracked.guess = length, ()
        if depth <= 0 or length < self.options.min_match:
            return NO_DRAFT
        tokens, shares = index.descend(state, min(depth, int(self.options.reach * length)))
        if not tokens:
            return NO_DRAFT
        tracked.guess = tuple(tokens)
        believed = self._rates.confidence(length, len(tokens))
        confidence = tuple(share * belief for share, belief in zip(shares, believed, strict=False))
        return Draft(tracked.guess, drafter=self.name, confidence=confidence)

    def _track(self, context: Context) -> _Tracked:
        """Read what is new of a sequence."""
        tracked = self._tracked.get(context.sequence_id)
        if tracked is None or tracked.seen > len(context.tokens):
            given = self._given.pop(context.sequence_id, 0)
            tracked = self._tracked[context.sequence_id] = _Tracked(context, given=given)
        fresh = np.array(context.tokens[tracked.seen :], np.int32)
        self._read_own(tracked, fresh)
        self._shared.follow(tracked.matches, fresh[-self.options.sequence_tokens :])
        tracked.seen = len(context.tokens)
        return tracked

    def _read_own(self, tracked: _Tracked, fresh: Int32) -> None:
        """Index new tokens; a full index starts again from the latter half of what it may hold."""
        if tracked.own.size + len(fresh) > self.options.sequence_tokens:
            tracked.own = SuffixIndex()
            fresh = np.array(tracked.context.tokens[-(self.options.sequence_tokens // 2) :], np.int32)
        tracked.own.extend(fresh)

    def _longest(self, tracked: _Tracked) -> tuple[SuffixIndex, int, int]:
        """The index with the longest match, its state and the match's length; the sequence's own wins ties."""
        best = (tracked.own, *tracked.own.repeated())
        for match in tracked.matches:
            if match.length > best[2]:
                best = (match.index, match.index.settle(match.state, match.length), match.length)
        return best


class _SharedMemory:
    """Past outputs in two generations: the young one grows, the old one is dropped when the young one is full."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._generations: list[SuffixIndex] = []
        self._waiting: deque[list[int]] = deque()
        self._waiting_tokens = 0

    def add(self, output: Sequence[int]) -> None:
        """Queue an output; when more waits than could be kept, the oldest is dropped."""
        if not self._capacity or len(output) < 2:
            return
        self._waiting.append(list(output)[-self._capacity // 2 :])
        self._waiting_tokens += len(self._waiting[-1])
        while self._waiting_tokens > self._capacity // 2 and len(self._waiting) > 1:
            self._waiting_tokens -= len(self._waiting.popleft())

    def digest(self) -> None:
        """Take a bounded number of waiting tokens in."""
        budget = _LEARN_PER_CALL
        while self._waiting and budget:
            output = self._waiting[0]
            part = output[:budget]
            self._young().extend(part)
            budget -= len(part)
            self._waiting_tokens -= len(part)
            del output[: len(part)]
            if not output:
                self._waiting.popleft()
                self._young().restart()

    def follow(self, matches: list[_Match], fresh: Int32) -> None:
        """Advance a sequence's matches over its new tokens; matches in dropped generations go."""
        known = [match for match in matches if any(match.index is g for g in self._generations)]
        known += [_Match(g) for g in self._generations if not any(match.index is g for match in known)]
        for match in known:
            match.follow(fresh)
        matches[:] = known

    def _young(self) -> SuffixIndex:
        if not self._generations or self._generations[-1].size >= self._capacity // 2:
            self._generations = [*self._generations[-1:], SuffixIndex()]
        return self._generations[-1]
