"""Prefixes kept on disk on request: KV of full pages that a restart, or another process, can use.

One safetensors file per prefix, written beside its final name, synced and renamed, so that a kill leaves either a whole
file or a temporary one that the next start removes. Every tensor has a checksum in the file's header. All prefixes of a
folder, of whatever model, share a bound: the least recently used ones make room. A file's time stamp says when it was
used.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.errors import CapacityError, TransferError

FORMAT = "outrider.prefix/1"
PATTERN = "outrider-prefix-*.safetensors"
#: A temporary file this old belongs to nobody, whatever its name says.
STALE_SECONDS = 3600
UNLIMITED = 1 << 62
#: Bytes that a file has beside its tensors, at most: names, shapes and checksums, per tensor.
HEADER_BYTES, HEADER_BYTES_EACH = 512, 192


class SavedFile(NamedTuple):
    """A prefix on disk. used: seconds since 1970; model: whose it is, as a digest."""

    path: Path
    tokens: int
    nbytes: int
    used: float
    model: str


class SavedPrefixes:
    """The prefixes of one model in one folder.

    `fingerprint` must say all that the KV depends on: weights, KV type, page size. limit: bytes of all prefixes that
    are in the folder, those of other models included.
    """

    def __init__(self, folder: str | Path, fingerprint: str, limit: int = UNLIMITED) -> None:
        self._folder, self.limit = Path(folder).expanduser(), limit
        self.model = blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        self.removed = 0  # files that made room for others
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._lengths = {file.tokens for file in self.files() if file.model == self.model}
        self._make_room(0)

    def files(self) -> list[SavedFile]:
        """All prefixes of the folder, the least recently used first."""
        return sorted(_described(self._folder.glob(PATTERN)), key=lambda file: (file.used, file.path.name))

    def save(self, tokens: Sequence[int], tensors: Mapping[str, NDArray]) -> Path | None:
        """Keep the KV of `tokens` under their own name; an older file of the same prefix is replaced.

        None where the file alone would be larger than all files may be. CapacityError where the disk is full.
        """
        path = self._path(tokens)
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        size = sum(array.nbytes + HEADER_BYTES_EACH for array in arrays.values()) + HEADER_BYTES
        if size > self.limit:
            return None
        self._make_room(size)
        sums = {name: _checksum(array) for name, array in arrays.items()}
        header = {"format": FORMAT, "checksums": json.dumps(sums), "tokens": str(len(tokens))}
        partial = path.with_suffix(f".{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        try:
            save_file(arrays, partial, metadata=header)
            _sync(partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise CapacityError(f"the prefix cannot be saved in {self._folder} ({error}); free space there") from None
        with contextlib.suppress(OSError):  # not every file system syncs names
            _sync(self._folder)
        self._lengths.add(len(tokens))
        self._make_room(0)  # another process may have written meanwhile
        return path

    def find(self, tokens: Sequence[int]) -> int:
        """The length of the longest saved prefix of `tokens`; 0: none."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(tokens) and self._path(tokens[:length]).exists():
                return length
        return 0

    def load(self, tokens: Sequence[int]) -> dict[str, NDArray]:
        """The tensors saved for exactly these tokens, which count as used. TransferError where the file is missing,
        short or corrupt."""
        path = self._path(tokens)
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            sums = json.loads(header["checksums"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise TransferError(f"{path} cannot be used ({error}); delete it, the prefix is computed again") from None
        whole = header.get("format") == FORMAT and set(sums) == set(tensors)
        if not whole or any(_checksum(t) != sums[name] for name, t in tensors.items()):
            raise TransferError(f"{path} is corrupt; delete it, the prefix is computed again")
        self.touch(tokens)
        return tensors

    def touch(self, tokens: Sequence[int]) -> None:
        """The file of exactly these tokens, where there is one, counts as used now."""
        with contextlib.suppress(OSError):
            os.utime(self._path(tokens))

    def drop(self, tokens: Sequence[int]) -> None:
        """Delete the file of exactly these tokens, where there is one; one that stays is not looked for again."""
        try:
            self._path(tokens).unlink(missing_ok=True)
        except OSError:
            self._lengths.discard(len(tokens))

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` more bytes are within the bound."""
        files = self.files()
        total = sum(file.nbytes for file in files) + size
        for file in files:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                file.path.unlink()
                self.removed += 1
            total -= file.nbytes

    def _path(self, tokens: Sequence[int]) -> Path:
        digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).hexdigest()
        return self._folder / f"outrider-prefix-{self.model}-{len(tokens)}-{digest}.safetensors"

    def _sweep(self) -> None:
        for path in self._folder.glob("outrider-prefix-*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS or not _alive(path):
                    path.unlink()


def _described(paths: Iterable[Path]) -> Iterable[SavedFile]:
    """The files that are there and named as ours are."""
    for path in paths:
        parts = path.stem.split("-")
        with contextlib.suppress(OSError):  # another process may just have removed it
            if len(parts) == 5 and parts[3].isdecimal():
                facts = path.stat()
                yield SavedFile(path, int(parts[3]), facts.st_size, facts.st_mtime, parts[2])


def _alive(partial: Path) -> bool:
    """Whether the process that a temporary file is named after still runs."""
    owner = partial.suffixes[-2].lstrip(".").partition("-")[0] if len(partial.suffixes) > 1 else ""
    try:
        os.kill(int(owner), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:
        return True  # it runs, and is somebody else's
    return True


def _checksum(array: NDArray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
