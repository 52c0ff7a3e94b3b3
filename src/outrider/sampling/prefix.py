"""Finding how much of an earlier output a new one shares, so that per-prefix state can be reused instead of rebuilt."""

from __future__ import annotations

from collections.abc import Sequence


def shared_length(known: list[int], output: Sequence[int]) -> int:
    """Length of the longest common prefix. Outputs differ near their end, if at all, so the search starts there."""
    length = min(len(known), len(output))
    if known[:length] == list(output[:length]):
        return length
    return next(i for i in range(length) if known[i] != output[i])
