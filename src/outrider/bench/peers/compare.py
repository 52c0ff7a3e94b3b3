"""Engines in turns on the same prompts: decode of one stream and of several, and prefill.

The median of the rounds is quoted, and ratios are medians of the ratios within a round: absolute speeds drift between
rounds on a shared machine, ratios hardly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from outrider.bench.peers.peer import Peer, Timing
from outrider.bench.record import note


@dataclass
class Shape:
    """What is asked of every engine."""

    name: str  # "decode", "decode x8", "prefill 512"
    prompts: list[list[int]]
    count: int

    def speed(self, timing: Timing) -> float:
        """Tokens per second of what the shape is about."""
        if self.count == 1:
            return sum(map(len, self.prompts)) / timing.first_s
        return timing.tokens_per_second


@dataclass
class Entry:
    """One engine's speeds on one shape, a value per round."""

    peer: Peer
    shape: Shape
    speeds: list[float] = field(default_factory=list)

    def row(self, ours: Entry) -> dict[str, Any]:
        """The record's row; ratios are taken within a round."""
        ratios = [mine / theirs for mine, theirs in zip(ours.speeds, self.speeds, strict=True)]
        return {
            "peer": self.peer.name,
            "version": self.peer.version,
            "settings": self.peer.settings,
            "shape": self.shape.name,
            "streams": len(self.shape.prompts),
            "prompt_tokens": sum(map(len, self.shape.prompts)),
            "output_tokens": self.shape.count,
            "tokens_per_second": median(self.speeds),
            "spread": [min(self.speeds), max(self.speeds)],
            f"{ours.peer.name}_over_it": median(ratios),
        }


def compare(peers: Sequence[Peer], shapes: Sequence[Shape], repeats: int) -> list[dict[str, Any]]:
    """A row per engine and shape; the first engine is ours."""
    rows = []
    for shape in shapes:
        entries = [Entry(peer, shape) for peer in peers]
        for peer in peers:
            peer.run(shape.prompts[:1], min(shape.count, 4))  # compile and touch the weights first
        for _ in range(repeats):
            for entry in entries:
                entry.speeds.append(shape.speed(entry.peer.run(shape.prompts, shape.count)))
                note(f"{shape.name} {entry.peer.name}: {entry.speeds[-1]:.1f} tokens/s")
        rows += [entry.row(entries[0]) for entry in entries]
    return rows
