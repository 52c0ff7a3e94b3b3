"""What speculation did so far: per drafter and as a whole, for metrics, `RequestOutput` and the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.memory.report import ContextReport
from outrider.speculation.history import Moment


@dataclass(frozen=True)
class DrafterReport:
    """One drafter's record. A round is one verification in which it was asked; counts are cumulative."""

    name: str
    rounds: int = 0  # verified rounds in which it was asked
    proposals: int = 0  # rounds in which it proposed something
    agreed_tokens: int = 0  # of its own proposals, whether or not they won
    drafts: int = 0  # drafts handed to the target under its name
    draft_tokens: int = 0
    accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()  # accepted tokens by position in the draft
    votes_won: int = 0  # rounds won against at least one other proposal
    weight: float = 1.0  # its share of the vote
    time_s: float = 0.0
    failures: int = 0
    off: str | None = None  # why it was switched off
    held: int = 0  # sequences that it holds something for now

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification of its drafts: 1 + accepted / drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class SpeculationReport:
    """The record of all drafters. Times are cumulative seconds; `control_s` is the policies' own part of a step."""

    drafters: tuple[DrafterReport, ...] = ()
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    control_s: float = 0.0
    lengths: Mapping[int, int] = field(default_factory=dict)  # draft length -> how many drafts of it were handed out
    history: tuple[Moment, ...] = ()  # how it went over time, oldest first
    context: ContextReport = field(default_factory=ContextReport)  # what attention read meanwhile

    @property
    def num_drafts(self) -> int:
        """Drafts that were verified."""
        return sum(drafter.drafts for drafter in self.drafters)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of those drafts."""
        return sum(drafter.draft_tokens for drafter in self.drafters)

    @property
    def num_accepted_tokens(self) -> int:
        """Of these, tokens that the target accepted."""
        return sum(drafter.accepted_tokens for drafter in self.drafters)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts over all drafters."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0
