"""The buffers of a compiled forward pass: grown when a batch needs more, then reused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.cpu.layout import BLOCK, CHUNK, PLANES, PRIVATE, SPLIT, STEP
from outrider.kernels.cpu.product import MAX_ROWS
from outrider.kernels.cpu.vectors import MAX_QUERIES

_LINE = 64


def address(array: NDArray) -> int:
    """Where an array's data begins; 0 for an empty one."""
    return int(array.__array_interface__["data"][0]) if array.size else 0


def padded(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


class Workspace:
    """Buffers for `rows` rows of one model; their addresses and strides stand in the `step` record."""

    def __init__(self, sizes: dict[str, int], members: int) -> None:
        self.step = np.zeros(1, STEP)
        self._sizes, self._members = sizes, members
        self._rows = self._wanted = self._partials = 0
        self._held: dict[str, NDArray[np.uint8]] = {}
        self._fixed()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._held.values())

    def fit(self, rows: int, wanted: int, chunks: int) -> None:
        """Make room for `rows` rows, `wanted` logit rows and, for few rows, `chunks` chunks of attention."""
        wanted = max(1, wanted)  # a chunk of a prompt wants no logits, but the record must hold addresses
        if rows > self._rows:
            self._rows = padded(rows, 16)
            self._grow_rows()
        if wanted > self._wanted:
            self._grow_wanted(wanted)
        if rows <= SPLIT:
            self._fit_partials(chunks)

    def best(self, wanted: int) -> NDArray[np.int64]:
        """The best token of every logit row of the last pass (a copy)."""
        return self._held["best"].view(np.int64)[:wanted].copy()

    def _fixed(self) -> None:
        sizes = self._sizes
        self._take("sync", 128)
        self._grow_wanted(1)
        self._take("tile", self._members * 2048)
        self._take("entries", self._members * 2 * (CHUNK + 16) * 8)
        self._take("chunk", self._members * MAX_QUERIES * CHUNK * 4)
        stride = _LINE + padded(sizes["head_pad"] * 4, _LINE)
        self.step["state_stride"] = stride
        self._take("state", self._members * (BLOCK + 1) * sizes["shared"] * stride)
        queries = BLOCK * sizes["shared"]  # of attention over entries that all rows of a block read
        pieces = queries * (sizes["head_pad"] * 4 + CHUNK * 4 + stride)
        self.step["common_stride"] = 16 * sizes["head_pad"] * 4 + pieces
        self._take("common", self._members * int(self.step["common_stride"][0]))

    def _grow_rows(self) -> None:
        sizes = self._sizes
        rows = self._rows + MAX_ROWS  # products read up to a full block
        prepared = max(rows, self._members * PRIVATE + MAX_ROWS)
        for name in ("x", "qkv", "query", "mixed", "hidden"):
            self._take_rows(name, rows, sizes[name] * 4)
        self.step["x_stride"] = sizes["x"] * 4
        self._take("normed", prepared * sizes["x"] * 4)
        self._take_rows("q", prepared, sizes["inputs"])
        self._take_rows("meta", prepared * PLANES, sizes["inputs"] // 32 * 4)
        self.step["meta_plane"] = prepared * (sizes["inputs"] // 32) * 4

    def _grow_wanted(self, wanted: int) -> None:
        self._wanted = padded(wanted, 16)
        self._take("lead", self._members * self._wanted * 4)
        self._take("best", self._members * self._wanted * 8)

    def _fit_partials(self, chunks: int) -> None:
        stride = int(self.step["state_stride"][0])
        need = SPLIT * self._sizes["heads"] * chunks * stride
        if need > self._partials:
            self._partials = need + need // 2
            self._take("partial", self._partials)
        self.step["chunks"] = chunks

    def _take_rows(self, name: str, rows: int, stride: int) -> None:
        self._take(name, rows * stride)
        self.step[f"{name}_stride"] = stride

    def _take(self, name: str, size: int) -> None:
        """A zeroed buffer on a cache line; its address goes into the record."""
        whole = np.zeros(size + _LINE, np.uint8)
        skip = -address(whole) % _LINE
        self._held[name] = whole[skip : skip + size]
        self.step[name] = address(self._held[name])
