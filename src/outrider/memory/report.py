"""What reading less of the context did so far, for reports, metrics and the chat footer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContextReport:
    """The record of one engine. A step here is one sequence's part of a forward pass, prefill not counted.

    `captured` and `overlap` are means over the steps that were looked at (every few): the share of attention that the
    selector believes its selection holds, and the share of a selection that the step before had read too.
    """

    mode: str = "full"
    selector: str | None = None  # None: nothing is ever selected
    budget: int | None = None  # entries per KV head; requests may bring their own
    sparse_steps: int = 0
    full_steps: int = 0
    read_entries: int = 0  # committed entries read per KV head, over all steps
    known_entries: int = 0  # committed entries there were
    captured: float | None = None
    overlap: float | None = None
    select_s: float = 0.0  # seconds spent on selecting
    selector_bytes: int = 0  # held for selection

    @property
    def read_share(self) -> float:
        """Entries read over entries there were; 1 before the first step."""
        return self.read_entries / self.known_entries if self.known_entries else 1.0
