"""The selector protocol: which KV entries attention reads in a step.

A selector only scores. What is always read (sinks, the recent window, the rows of the pass itself), the budget and the
form of the answer are the same for all selectors and live in choose.py. To add one, write a class with `score`, name
it in memory/selectors.py and build it in reader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.errors import ConfigError, UnsupportedError
from outrider.types import Float32, Int32


class View(NamedTuple):
    """One sequence as a selector sees it before a step. Selectors change nothing reachable from here."""

    sequence_id: int
    length: int  # committed entries
    block: int  # rows of this pass; they read each other whatever is selected
    budget: int  # entries per KV head, block included
    pages: Int32  # [P] physical page of every logical page
    queries: Float32 | None = None  # [taps, query heads, head_dim] of the latest committed row, rotated


#: `map`, or what does the same on several threads.
Share = Callable[[Callable[..., None], Iterable[Any]], Iterable[None]]


class Selector(Protocol):
    """Scores the committed entries of one sequence.

    unit: entries that share a score (1, or a page). groups [L]: the group of each layer; layers of one group share a
    selection. taps: layers whose queries View.queries must carry, in this order. weighs: whether exp(score) estimates
    attention mass, so that a share of it says what a selection captures.
    """

    name: str
    unit: int
    groups: Int32
    taps: tuple[int, ...]
    weighs: bool

    def score(self, view: View, share: Share = map) -> Float32 | None:
        """Scores [G, KV heads, ceil(length / unit)], higher is better; None: cannot tell yet, read everything.

        `share` runs a function on several arguments, perhaps side by side; what it runs needs no interpreter.
        Scores are natural logarithms of estimated attention mass up to a constant, so that differences compare.
        """
        ...


class Preference(Protocol):
    """What else than its score speaks for an entry."""

    def favour(self, view: View, unit: int, scores: Float32) -> Float32:
        """Scores to choose by; `scores` itself stays as it is."""
        ...

    def settle(self, view: View, unit: int, entries: Int32) -> None:
        """What was chosen for the step: entries [G, KV heads, n], ascending."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence ended: release what is held for it. Never fails."""
        ...


def group_layers(layers: int, size: int) -> Int32:
    """Group [L] of each layer, `size` consecutive layers to a group; size 0 means one group, as published."""
    if size < 0:
        raise ConfigError(f"layers per group = {size} is refused; use 0 (all layers share) or more", "group")
    return np.arange(layers, dtype=np.int32) // (min(size, layers) or layers)


def spread_taps(groups: Int32, per_group: int) -> tuple[tuple[int, ...], Int32]:
    """Layers to observe, `per_group` (0: all) spread evenly over each group, and the group of each of them."""
    taps: list[int] = []
    for group in range(int(groups.max()) + 1):
        layers = np.flatnonzero(groups == group)
        count = min(per_group or len(layers), len(layers))
        picks = ((2 * np.arange(count) + 1) * len(layers)) // (2 * count)
        taps.extend(int(layers[pick]) for pick in picks)
    return tuple(taps), groups[np.asarray(taps)]


def check_budget(budget: int, sinks: int, window: int, request_id: str | None = None) -> None:
    """Refuse a budget that cannot hold what is always read; names the smallest one that can."""
    if sinks < 0:
        raise ConfigError(f"sinks = {sinks} is refused; use 0 or more", "sinks")
    if window < 1:
        raise ConfigError(f"window = {window} is refused; use 1 or more", "window")
    if budget >= sinks + window + 1:
        return
    text = (
        f"budget = {budget} is refused; {sinks} sinks and {window} recent entries are always read, so use "
        f"{sinks + window + 1} or more, or lower window"
    )
    if request_id is not None:
        raise UnsupportedError(text, request_id, "context_budget")
    raise ConfigError(text, "budget")


def group_count(groups: Sequence[int] | Int32) -> int:
    """Number of layer groups."""
    return int(np.max(groups)) + 1
