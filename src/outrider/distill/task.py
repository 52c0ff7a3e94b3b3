"""What is trained: a module, its loss on a batch, what it drafts right, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from outrider.distill.losses import Losses
from outrider.distill.shards import Entry


class Task(Protocol):
    """One kind of drafter under training."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def copy(self) -> Task:
        """The same with a module of its own."""
        ...

    def slow(self) -> Sequence[nn.Parameter]:
        """Parameters that learn at `lm_head_lr` times the rate."""
        ...

    def loss(self, entries: Sequence[Entry], steps: int) -> Losses:
        """The loss of one batch; `steps` is how often a head is fed its own states."""
        ...

    def right(self, entry: Entry, depth: int) -> np.ndarray:
        """Whether the i-th token of a draft is right at row r, if those before it were: bool [depth, rows]."""
        ...

    def export(self, folder: Path) -> None:
        """Write the drafter, read it again and check it. CapacityError on a full disk."""
        ...

    def drafter(self, folder: Path) -> Mapping[str, Any]:
        """How the exported drafter is named in speculative_config."""
        ...

    def facts(self) -> dict[str, Any]:
        """Lines of the card."""
        ...
