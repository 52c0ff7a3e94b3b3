"""Plain decoding as a null object: the loop is the same, drafts are empty."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Context, Need, Observation
from outrider.speculation.report import SpeculationReport
from outrider.speculation.timing import StepTiming
from outrider.types import NO_DRAFT, Draft


class NoSpeculator:
    """Drafts nothing and learns nothing; keeps the times, so that plain runs report them too."""

    needs: frozenset[Need] = frozenset()
    max_depth = 0

    def __init__(self) -> None:
        self._report = SpeculationReport()

    def draft(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft]:
        """An empty draft for everyone."""
        return [NO_DRAFT] * len(contexts)

    def observe(self, observations: Sequence[Observation], timing: StepTiming) -> None:
        past = self._report
        self._report = SpeculationReport(
            steps=past.steps + 1,
            verify_s=past.verify_s + timing.verify_s,
            overhead_s=past.overhead_s + timing.overhead_s,
        )

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""

    def report(self) -> SpeculationReport:
        return self._report
