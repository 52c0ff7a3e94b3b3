"""What the engine shows to selection: a sequence before a step, and what a step gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.types import Float32, Int32


class Look(NamedTuple):
    """`block` rows follow `length` committed entries; prefill says so and reads everything."""

    sequence_id: int
    length: int
    block: int
    pages: Int32  # [P] physical page of every logical page
    budget: int | None = None  # the request's own; None: the configured one
    prefill: bool = False


class Gain(NamedTuple):
    """Entries `start` .. `start + len(slots) - 1` of a sequence were committed."""

    sequence_id: int
    start: int
    slots: Int32
    tokens: Sequence[int]  # of these entries
    following: int | None  # the token behind them, where it is known
    queries: Float32 | None  # [query taps, heads, head_dim] of the last of them, where the step sampled
    states: Float32 | None  # [state taps, entries, hidden], where asked for
