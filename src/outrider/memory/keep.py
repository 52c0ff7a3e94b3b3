"""Prompts whose KV stays on disk for later starts: found when a request begins, written when one ends.

Only what a recomputation would give again, bit for bit, is kept, in whole pages; what a retrieval head holds of these
goes along, so that a prompt that is found selects as the cold one did. A file that is damaged is deleted and the prompt
computed anew (memory/tiers/saved.py holds the files, their checksums and the bound on their size).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CapacityError, TransferError
from outrider.memory.report import KeptReport
from outrider.memory.tiers.saved import SavedFile, SavedPrefixes
from outrider.models.spec import DecoderSpec, SlicedWeight, Weights

log = logging.getLogger(__name__)
Planes = list[list[NDArray]]  # by layer, [pages, KV heads, page size, ...] each
ROWS = 4  # of every matrix, for the fingerprint
_HELD = "held"


class Prompt(NamedTuple):
    """Whole pages of a prompt: KV, and what selection holds for them [pages, ...]."""

    planes: Planes
    held: list[NDArray]

    def after(self, pages: int) -> Prompt:
        """All but the first pages."""
        return Prompt([[plane[pages:] for plane in part] for part in self.planes], [part[pages:] for part in self.held])

    def named(self) -> dict[str, NDArray]:
        """Every array by its name in a file."""
        arrays = {f"{layer}.{kind}": plane for layer, part in enumerate(self.planes) for kind, plane in enumerate(part)}
        return arrays | {f"{_HELD}.{number}": part for number, part in enumerate(self.held)}

    @classmethod
    def of(cls, arrays: dict[str, NDArray]) -> Prompt:
        """What `named` gave."""
        held = [arrays[f"{_HELD}.{number}"] for number in range(sum(name.startswith(_HELD) for name in arrays))]
        layers = 1 + max(int(name.split(".")[0]) for name in arrays if not name.startswith(_HELD))
        kinds = (len(arrays) - len(held)) // layers
        return cls([[arrays[f"{layer}.{kind}"] for kind in range(kinds)] for layer in range(layers)], held)


class NoPrompts:
    """The null object: nothing is kept, nothing is found."""

    model = ""  # names whose prompts these are, as their files do

    def find(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are there."""
        return 0

    def load(self, tokens: Sequence[int]) -> Prompt | None:
        """What was kept of exactly these tokens; None where it turns out to be damaged."""
        return None

    def keep(self, tokens: Sequence[int], take: Callable[[], Prompt | None]) -> None:
        """Whole pages of a prompt, as `take` gives them; nothing happens where it is there, or too short."""

    def files(self) -> list[SavedFile]:
        """What is on disk, of whatever model, the least recently used first."""
        return []

    def report(self) -> KeptReport | None:
        """Counts and sizes; None where nothing is ever kept."""
        return None


class KeptPrompts(NoPrompts):
    """Prompts of `least` tokens or more, in one folder of at most `limit` bytes of them."""

    def __init__(self, folder: str | Path, fingerprint: str, least: int, limit: int) -> None:
        self._saved, self._least = SavedPrefixes(folder, fingerprint, limit), least
        self.model = self._saved.model
        self.found = self.written = self.damaged = self.failed = self.too_large = 0

    def find(self, tokens: Sequence[int]) -> int:
        return self._saved.find(tokens)

    def load(self, tokens: Sequence[int]) -> Prompt | None:
        try:
            prompt = Prompt.of(self._saved.load(tokens))
        except (TransferError, LookupError, ValueError) as error:  # its bytes are wrong, or its arrays no prompt's
            log.warning("a kept prompt is damaged and computed anew: %s", error)
            self._saved.drop(tokens)
            self.damaged += 1
            return None
        self.found += 1
        return prompt

    def keep(self, tokens: Sequence[int], take: Callable[[], Prompt | None]) -> None:
        if len(tokens) < self._least:
            return
        if self._saved.find(tokens) == len(tokens):
            self._saved.touch(tokens)
            return
        prompt = take()
        if prompt is None:
            return
        try:
            path = self._saved.save(tokens, prompt.named())
        except CapacityError as error:
            log.warning("%s", error)
            self.failed += 1
            return
        self.written += path is not None
        self.too_large += path is None

    def files(self) -> list[SavedFile]:
        return self._saved.files()

    def report(self) -> KeptReport:
        files = self.files()
        return KeptReport(
            files=len(files),
            tokens=sum(file.tokens for file in files),
            bytes=sum(file.nbytes for file in files),
            limit=self._saved.limit,
            found=self.found,
            written=self.written,
            removed=self._saved.removed,
            damaged=self.damaged,
            failed=self.failed,
            too_large=self.too_large,
        )


def fingerprint(spec: DecoderSpec, weights: Weights, *more: object) -> str:
    """All that KV depends on: the shape, a few rows of every matrix, and whatever else is given."""
    digest = blake2b(repr((spec, more)).encode(), digest_size=16)
    for name in sorted(weights):
        weight = weights[name]
        if isinstance(weight, SlicedWeight) and len(weight.shape) > 1:
            few = weight.part(0, min(ROWS, weight.shape[0])).dense()
        else:  # vectors have no rows to take
            few = weight.dense()
        digest.update(np.ascontiguousarray(few[:ROWS]).tobytes())
    return digest.hexdigest()
