"""What placement is told: how KV is to be placed, and what its buffers are made for."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.types import Int32


@dataclass(frozen=True)
class Rules:
    """How an engine wants its KV placed. limit: bytes of fast memory. The rest are ablations and forced settings."""

    limit: int
    elastic: bool = True  # load only what the step before did not have
    ahead: int | None = None  # slow layers whose loads may run ahead; None: all
    slow_layers: int | None = None  # None: as few as fit


@dataclass(frozen=True)
class Shape:
    """What the buffers are made for. groups [L] as in Selection; capacity: the largest budget; rows: of a pass."""

    groups: Int32
    capacity: int
    sequences: int
    rows: int
    longest: int  # tokens of one sequence
    selector_bytes: int = 0  # per token, resident
