"""What one step cost, as the engine tells it to the adaptive part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step by phase, and its size. `rows` are all rows of the forward pass, drafts included."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    sequences: int = 0
    rows: int = 0
    pool: int = 0  # drafts that wait for the target, where a pipeline makes them ahead

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.draft_s + self.verify_s + self.overhead_s
