"""One sequence before a step, as the engine shows it to selection."""

from __future__ import annotations

from typing import NamedTuple

from outrider.types import Int32


class Look(NamedTuple):
    """`block` rows follow `length` committed entries; prefill says so and reads everything."""

    sequence_id: int
    length: int
    block: int
    pages: Int32  # [P] physical page of every logical page
    budget: int | None = None  # the request's own; None: the configured one
    prefill: bool = False
