"""What reading less of the context did so far, for reports, metrics and the chat footer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierReport:
    """What keeping layers in the slow tier did so far. Seconds and bytes since the start.

    busy_s: the transfer thread worked; exposed_s: somebody waited for it; the rest of it was hidden behind the layers.
    """

    layers: int = 0
    slow_layers: int = 0  # now
    moved_layers: int = 0  # went down or came back
    loads: int = 0
    stores: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    failures: int = 0  # of transfers
    lost_sequences: int = 0  # whose KV could not be read; they were computed again or ended


@dataclass(frozen=True)
class KeptReport:
    """Prompts that stay on disk: what is there now, of whatever model, and what happened since the start."""

    files: int = 0
    tokens: int = 0
    bytes: int = 0
    limit: int = 0  # bytes that all files may take
    found: int = 0  # prompts that a request began on
    written: int = 0
    removed: int = 0  # least recently used ones that made room
    damaged: int = 0  # deleted, and computed again
    failed: int = 0  # that the disk did not take
    too_large: int = 0  # that alone would have passed the limit


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
    tiers: TierReport | None = None  # None: there is no slow tier
    kept: KeptReport | None = None  # None: no prompts are kept

    @property
    def read_share(self) -> float:
        """Entries read over entries there were; 1 before the first step."""
        return self.read_entries / self.known_entries if self.known_entries else 1.0
