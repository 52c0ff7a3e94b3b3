"""What the `head` drafter asks of whatever runs an EAGLE-3 head: compiled on a CPU, PyTorch elsewhere.

Slot t of a head joins the target's fused states at position t with the embedding of token t + 1; its K and V are kept
per sequence. Rows of committed tokens are kept, those of drafted ones never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.models.eagle3_spec import Eagle3Spec
from outrider.types import Float32


class Entries(Protocol):
    """Keys and values of one sequence's committed slots, in order. They grow by the jobs that hold them."""

    count: int

    @property
    def keys(self) -> Float32:
        """Rotated keys [kv_heads, count, head_dim], read-only; valid until the next job of this sequence."""
        ...

    def first(self, count: int) -> Entries:
        """A copy of the first `count` slots."""
        ...


@dataclass
class Job:
    """One sequence's part of a call: rows to keep, and how many tokens to draft behind the last one."""

    entries: Entries
    features: Float32  # [rows, taps * hidden] the target's states at the head's taps, side by side
    tokens: Sequence[int]  # [rows] the token one ahead of each row
    first: int  # position of the first row
    depth: int  # 0: only keep the rows


class Guess(NamedTuple):
    """A greedy chain of target ids and the head's probability of each over its own vocabulary."""

    tokens: list[int]
    confidence: list[float]


class Chain(Protocol):
    """A draft in the making, where somebody else chooses the tokens."""

    @property
    def logits(self) -> Float32:
        """Of every job's next token: [jobs, draft vocabulary]. Valid until `extend`."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on behind these target ids, one for every job."""
        ...


class HeadBackend(Protocol):
    """Runs one head. One thread calls it; a chain ends with the next call."""

    spec: Eagle3Spec
    ids: NDArray[np.int64]  # target id of every draft id

    def entries(self) -> Entries:
        """Room for a new sequence."""
        ...

    def greedy(self, jobs: Sequence[Job], floor: float) -> list[Guess]:
        """Keep the rows of all jobs and draft the best tokens; a chain stops behind a probability below `floor`."""
        ...

    def chain(self, jobs: Sequence[Job]) -> Chain:
        """Keep the rows of all jobs and begin their drafts, which may all become as deep as the deepest; from 1 on."""
        ...
