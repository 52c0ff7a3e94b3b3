"""The drafter protocol: what a contributor implements to add a way of guessing. See CONTRIBUTING.md.

A drafter never decides when to draft or how deep: depth is an argument. It may be wrong, slow or raise; that costs
speed, never output (speculation/speculator.py guards every call).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from outrider.types import Draft, Float32, Verdict

#: What a drafter wants to be given; declared, never isinstance-d. "features": the target's hidden states at its taps.
Need = Literal["features"]


class Chooser(Protocol):
    """The sequence's own way of turning logits into a token: greedy, or sampled with the sequence's own noise.

    A drafter that chooses with it guesses with the very noise the target will use, which raises acceptance.
    """

    @property
    def plain(self) -> bool:
        """Whether `pick` is nothing but the best token (the lowest id of the best), whatever came before."""
        ...

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        """The token this sequence would emit after `output` (its generated tokens so far) given these logits [V]."""
        ...


@dataclass(frozen=True)
class Context:
    """One sequence as a drafter sees it. Drafters must not change anything reachable from here."""

    sequence_id: int
    tokens: Sequence[int]  # every known token: prompt and output; the next one is to be guessed
    prompt_length: int
    chooser: Chooser


@dataclass(frozen=True)
class Observation:
    """What one step taught about one sequence."""

    sequence_id: int
    start: int  # index in the sequence of the first token computed in this step
    tokens: tuple[int, ...]  # tokens whose KV was committed in this step, from `start` on (prompt chunk or decode)
    verdict: Verdict
    features: Float32 | None = None  # [taps, len(tokens), hidden], for drafters that need "features"


class Drafter(Protocol):
    """A way of guessing the next tokens of many sequences at once.

    A drafter that keeps something per sequence may have `held`, their ids: metrics count them, and none may be left
    when all have ended. One that reads at most so many tokens of a text before it drafts may say so in `recall`.
    """

    name: str
    needs: frozenset[Need]

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        """One draft per context, at most depths[i] tokens deep; an empty draft means "no idea" and costs nothing."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from a step: which tokens became final, and the target's features where asked for."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence ended, was aborted or was preempted: release everything held for it. Never fails."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding as a null object."""

    name = "none"
    needs: frozenset[Need] = frozenset()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in contexts]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""
