"""A suffix automaton that grows a token at a time: every substring seen so far, and how often.

Blumer et al. 1985; online construction with clones, generalised to several texts (each starts at the root again).
A state stands for the substrings that end at the same places: the longest has `lengths[state]` tokens, and dropping
first tokens leads to `links[state]`. At most 2 states per token; extending costs O(1) amortised.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0
_COUNTED = 64  # suffixes per token whose count is raised; longer chains appear only in long runs of one token


class SuffixAutomaton:
    """All substrings of the texts fed to it. `last` is the state of the whole current text."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]  # occurrences of a state's substrings
        self.last = ROOT
        self.size = 0  # tokens fed

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current text."""
        for token in tokens:
            self.last = self._append(token)
            self._count(self.last)
        self.size += len(tokens)

    def restart(self) -> None:
        """The current text has ended; the next token begins another."""
        self.last = ROOT

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of a matched string + token that occurs; (ROOT, 0) for none."""
        state = self.settle(state, length)
        while state != ROOT and token not in self.next[state]:
            state = self.links[state]
            length = self.lengths[state]
        target = self.next[state].get(token)
        return (ROOT, 0) if target is None else (target, length + 1)

    def settle(self, state: int, length: int) -> int:
        """The state that stands for a matched string now: clones may have taken over the shorter ones."""
        while state != ROOT and length <= self.lengths[self.links[state]]:
            state = self.links[state]
        return state

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """(token, next state, share of the continuations) that followed `state` most often; (-1, ROOT, 0): none."""
        counts, best, total, token = self.counts, 0, 0, -1
        for candidate, target in self.next[state].items():
            count = counts[target]
            total += count
            if count >= best:  # of equals the latest found is the most recent
                best, token = count, candidate
        return (token, self.next[state][token], best / total) if token >= 0 else (-1, ROOT, 0.0)

    def _append(self, token: int) -> int:
        last, following = self.last, self.next[self.last].get(token)
        if following is not None:  # only where several texts share a beginning
            exact = self.lengths[following] == self.lengths[last] + 1
            return following if exact else self._clone(last, token, following)
        state = self._new(self.lengths[last] + 1, {}, ROOT, 0)
        while last != -1 and token not in self.next[last]:
            self.next[last][token] = state
            last = self.links[last]
        if last != -1:
            following = self.next[last][token]
            exact = self.lengths[following] == self.lengths[last] + 1
            self.links[state] = following if exact else self._clone(last, token, following)
        return state

    def _clone(self, state: int, token: int, following: int) -> int:
        """Split off the shorter substrings of `following`, those that also end elsewhere."""
        clone = self._new(
            self.lengths[state] + 1, dict(self.next[following]), self.links[following], self.counts[following]
        )
        while state != -1 and self.next[state].get(token) == following:
            self.next[state][token] = clone
            state = self.links[state]
        self.links[following] = clone
        return clone

    def _new(self, length: int, transitions: dict[int, int], link: int, count: int) -> int:
        self.next.append(transitions)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.links) - 1

    def _count(self, state: int) -> None:
        """The current text has ended here once more, and so have its suffixes."""
        for _ in range(_COUNTED):
            if state == ROOT:
                return
            self.counts[state] += 1
            state = self.links[state]
