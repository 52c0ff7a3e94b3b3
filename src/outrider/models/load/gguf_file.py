"""A GGUF file, memory-mapped: its header as plain Python values and its tensors as raw bytes.

The header is walked here rather than by `gguf.GGUFReader`, which makes several numpy arrays per vocabulary entry and
so takes seconds for a vocabulary of 150,000; the numbers of the format (types, block sizes) come from the gguf
package. Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from outrider.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored: `rows` uint8 [product of the outer dimensions, bytes per row], a view of the file."""

    name: str
    shape: tuple[int, ...]  # row-major: (out, in)
    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]

    def release(self) -> None:
        """Give the mapped pages of the rows back; a later read maps them again. Nothing where no file is mapped."""
        whole = self.rows
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if isinstance(whole.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = _address(self.rows) - _address(whole)
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            whole.base.madvise(mmap.MADV_DONTNEED, first, start + self.rows.nbytes - first)


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class GGUFFile:
    """Header fields and tensors of one file."""

    path: Path
    fields: Mapping[str, Any]  # scalars and strings as such, arrays as lists
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file. ModelError where it is missing, no GGUF, truncated or of an unknown version."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); check the file and its permissions") from None
    cursor = _Cursor(data.data, path)
    try:
        return _parse(cursor, data)
    except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError):
        raise ModelError(f"{path} is damaged (header, byte {cursor.at}); fetch it again") from None


def _parse(cursor: _Cursor, data: NDArray[np.uint8]) -> GGUFFile:
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{cursor.path} is not a GGUF file; give a .gguf file, a folder, a hub id or an alias")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ModelError(
            f"{cursor.path} has GGUF version {version}; supported: 2 and 3, little-endian; convert it with a newer tool"
        )
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    fields = {cursor.string(): cursor.value() for _ in range(cursor.fits(field_count))}
    entries = [_tensor_entry(cursor) for _ in range(cursor.fits(tensor_count))]
    alignment = int(fields.get("general.alignment", DEFAULT_ALIGNMENT))
    start = math.ceil(cursor.at / alignment) * alignment
    tensors = {entry[0]: _tensor(cursor.path, data, start, *entry) for entry in entries}
    return GGUFFile(cursor.path, fields, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, row-major shape, type number and offset of the next tensor in the header."""
    name, dimensions = cursor.string(), cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _tensor(
    path: Path, data: NDArray[np.uint8], start: int, name: str, shape: tuple[int, ...], number: int, offset: int
) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(
            f"{path}: {name} has tensor type {number}, unknown to the installed gguf package; "
            "upgrade it (pip install -U gguf) or use a file with a common quantisation such as Q4_K_M"
        ) from None
    block, size = GGML_QUANT_SIZES[kind]
    width = shape[-1] if shape else 1
    if width % block:
        raise ModelError(f"{path} is damaged ({name}: rows of {width} do not divide into blocks of {block})")
    row_bytes, rows = width // block * size, math.prod(shape[:-1])
    first, last = start + offset, start + offset + row_bytes * rows
    if last > len(data):
        raise ModelError(f"{path} is truncated ({name} ends at byte {last}, the file at {len(data)}); fetch it again")
    return GGUFTensor(name, shape, kind, data[first:last].reshape(rows, row_bytes))


class _Cursor:
    """Reads little-endian values one after the other; raises struct.error or ValueError past the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError("past the end")
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def number(self, code: str) -> Any:
        layout = "<" + code
        self.at += struct.calcsize(layout)
        return struct.unpack_from(layout, self.data, self.at - struct.calcsize(layout))[0]

    def fits(self, count: int) -> int:
        """A count of things of at least one byte each, refused where the rest of the file cannot hold them."""
        if count > len(self.data) - self.at:
            raise ValueError("past the end")
        return count

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int | None = None) -> Any:
        kind = GGUFValueType(self.number("I") if kind is None else kind)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self.number(SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = GGUFValueType(self.number("I")), self.number("Q")
        self.fits(count)
        if kind in SCALARS:
            code = np.dtype("<" + SCALARS[kind])
            return np.frombuffer(self.take(count * code.itemsize), code).tolist()
        return [self.value(kind) for _ in range(count)]
