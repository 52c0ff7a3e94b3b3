"""When a sequence reads everything although it could read less: the modes of ContextConfig."""

from __future__ import annotations

from typing import Protocol

from outrider.config import ContextConfig


class ReadPolicy(Protocol):
    """Decides per sequence and step between a full and a sparse read. watches: whether `note` looks at `captured`."""

    watches: bool

    def wants_full(self, sequence_id: int) -> bool:
        """Whether this step reads everything."""
        ...

    def note(self, sequence_id: int, full: bool, captured: float) -> None:
        """What the step did, and the share of attention that its selection is believed to hold."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence ended."""
        ...


class AlwaysFull:
    """`full` mode, and the verifying passes of `lossless`."""

    watches = False

    def wants_full(self, sequence_id: int) -> bool:
        return True

    def note(self, sequence_id: int, full: bool, captured: float) -> None:
        """Nothing to decide."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


class AlwaysSparse(AlwaysFull):
    """`sparse` mode, as published, and the drafting passes of `lossless`."""

    def wants_full(self, sequence_id: int) -> bool:
        return False


class Bounded:
    """A full step every `every` steps, and after any whose selection is believed to have missed too much."""

    watches = True

    def __init__(self, every: int, least: float) -> None:
        self._every, self._least = every, least
        self._due: dict[int, int] = {}

    def wants_full(self, sequence_id: int) -> bool:
        return self._due.get(sequence_id, self._every) <= 1

    def note(self, sequence_id: int, full: bool, captured: float) -> None:
        left = self._every if full else self._due.get(sequence_id, self._every) - 1
        self._due[sequence_id] = left if captured >= self._least else 1

    def forget(self, sequence_id: int) -> None:
        self._due.pop(sequence_id, None)


def make_policy(config: ContextConfig) -> ReadPolicy:
    """The policy of the target's passes in this mode."""
    if config.mode == "sparse":
        return AlwaysSparse()
    if config.mode == "bounded":
        return Bounded(config.full_every, config.min_captured)
    return AlwaysFull()
