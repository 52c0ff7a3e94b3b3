"""Prompts whose KV stays on disk for later starts: found when a request begins, written when one ends.

Only what a recomputation would give again, bit for bit, is kept, in whole pages. A file that is damaged is deleted and
the prompt computed anew (memory/tiers/saved.py holds the files and their checksums).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CapacityError, TransferError
from outrider.memory.tiers.saved import SavedPrefixes
from outrider.models.spec import DecoderSpec, SlicedWeight, Weights

log = logging.getLogger(__name__)
Planes = list[list[NDArray]]  # by layer, [pages, KV heads, page size, ...] each
ROWS = 4  # of every matrix, for the fingerprint


class NoPrompts:
    """The null object: nothing is kept, nothing is found."""

    def find(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are there."""
        return 0

    def load(self, tokens: Sequence[int]) -> Planes | None:
        """KV of exactly these tokens; None where it turns out to be damaged."""
        return None

    def keep(self, tokens: Sequence[int], take: Callable[[], Planes | None]) -> None:
        """Whole pages of a prompt whose KV `take` gives; nothing happens where it is there, or too short."""


class KeptPrompts(NoPrompts):
    """Prompts of `least` tokens or more, in one folder."""

    def __init__(self, folder: str | Path, fingerprint: str, least: int) -> None:
        self._saved, self._least = SavedPrefixes(folder, fingerprint), least
        self.found = self.written = 0

    def find(self, tokens: Sequence[int]) -> int:
        return self._saved.find(tokens)

    def load(self, tokens: Sequence[int]) -> Planes | None:
        try:
            tensors = self._saved.load(tokens)
        except TransferError as error:
            log.warning("%s", error)
            self._saved.drop(tokens)
            return None
        self.found += 1
        layers = 1 + max(int(name.split(".")[0]) for name in tensors)
        kinds = len(tensors) // layers
        return [[tensors[f"{layer}.{kind}"] for kind in range(kinds)] for layer in range(layers)]

    def keep(self, tokens: Sequence[int], take: Callable[[], Planes | None]) -> None:
        if len(tokens) < self._least or self._saved.find(tokens) == len(tokens):
            return
        planes = take()
        if planes is None:
            return
        named = {f"{layer}.{kind}": plane for layer, part in enumerate(planes) for kind, plane in enumerate(part)}
        try:
            self._saved.save(tokens, named)
            self.written += 1
        except CapacityError as error:
            log.warning("%s", error)


def fingerprint(spec: DecoderSpec, weights: Weights, *more: object) -> str:
    """All that KV depends on: the shape, a few rows of every matrix, and whatever else is given."""
    digest = blake2b(repr((spec, more)).encode(), digest_size=16)
    for name in sorted(weights):
        weight = weights[name]
        few = weight.part(0, min(ROWS, weight.shape[0])).dense() if isinstance(weight, SlicedWeight) else weight.dense()
        digest.update(np.ascontiguousarray(few[:ROWS]).tobytes())
    return digest.hexdigest()
