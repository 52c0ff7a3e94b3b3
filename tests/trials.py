"""Drafts, and what became of them, written down in one line."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.trial import Trial, agreement
from outrider.types import Draft, Verdict


def chain(name: str, *tokens: int, confidence: tuple[float, ...] | None = None) -> Draft:
    """A drafter's chain."""
    return Draft(tokens, drafter=name, confidence=confidence)


def believed(*confidence: float, name: str = "a") -> Draft:
    """A chain of which only its drafter's confidence matters."""
    return Draft(tuple(range(len(confidence))), drafter=name, confidence=confidence)


def trial(draft: Draft, truth: Sequence[int], sequence_id: int = 0) -> Trial:
    """The only proposal was verified where the target says `truth`."""
    return voted([draft], truth, draft, sequence_id)


def voted(proposals: Sequence[Draft], truth: Sequence[int], submitted: Draft, sequence_id: int = 0) -> Trial:
    """One of the proposals was verified where the target says `truth`."""
    verdict = Verdict(tuple(truth), tuple(range(agreement(submitted, truth))), len(submitted), submitted.drafter)
    return Trial(sequence_id, {draft.drafter: draft for draft in proposals}, submitted, verdict)
