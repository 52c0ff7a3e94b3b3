"""What one step cost, as the engine tells it to the adaptive part."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

Phase = Literal["draft", "verify", "overhead"]


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


class Stopwatch:
    """Seconds of one step by phase: a phase lasts from the end of the one before it, or the start, to its own end."""

    def __init__(self) -> None:
        self._spent: dict[Phase, float] = {"draft": 0.0, "verify": 0.0, "overhead": 0.0}
        self._since = perf_counter()

    def ended(self, phase: Phase) -> None:
        """A phase ends now; one that comes again is added up."""
        now = perf_counter()
        self._spent[phase] += now - self._since
        self._since = now

    def timing(self, sequences: int, rows: int) -> StepTiming:
        """What the phases took, for a step of this size."""
        spent = self._spent
        return StepTiming(spent["draft"], spent["verify"], spent["overhead"], sequences, rows)
