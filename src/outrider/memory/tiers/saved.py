"""Prefixes kept on disk on request: KV of full pages that a restart, or another process, can use.

One safetensors file per prefix, written beside its final name and renamed, so that a kill leaves either a whole file
or a temporary one that the next start removes. Every tensor has a checksum in the file's header.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.errors import CapacityError, TransferError

FORMAT = "outrider.prefix/1"
#: A temporary file this old belongs to nobody.
STALE_SECONDS = 3600


class SavedPrefixes:
    """The prefixes of one model in one folder.

    `fingerprint` must say all that the KV depends on: weights, KV type, page size.
    """

    def __init__(self, folder: str | Path, fingerprint: str) -> None:
        self._folder = Path(folder).expanduser()
        self._model = blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._lengths = {int(path.stem.split("-")[3]) for path in self._files()}

    def save(self, tokens: Sequence[int], tensors: Mapping[str, NDArray]) -> Path:
        """Keep the KV of `tokens` under their own name; an older file of the same prefix is replaced."""
        path = self._path(tokens)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        sums = {name: _checksum(array) for name, array in arrays.items()}
        header = {"format": FORMAT, "checksums": json.dumps(sums), "tokens": str(len(tokens))}
        try:
            save_file(arrays, partial, metadata=header)
            _sync(partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise CapacityError(f"the prefix cannot be saved in {self._folder} ({error}); free space there") from None
        self._lengths.add(len(tokens))
        return path

    def find(self, tokens: Sequence[int]) -> int:
        """The length of the longest saved prefix of `tokens`; 0: none."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(tokens) and self._path(tokens[:length]).exists():
                return length
        return 0

    def load(self, tokens: Sequence[int]) -> dict[str, NDArray]:
        """The tensors saved for exactly these tokens. TransferError where the file is missing, short or corrupt."""
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
        return tensors

    def drop(self, tokens: Sequence[int]) -> None:
        """Delete the file of exactly these tokens, where there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._path(tokens).unlink()

    def _path(self, tokens: Sequence[int]) -> Path:
        digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).hexdigest()
        return self._folder / f"outrider-prefix-{self._model}-{len(tokens)}-{digest}.safetensors"

    def _files(self) -> list[Path]:
        return list(self._folder.glob(f"outrider-prefix-{self._model}-*.safetensors"))

    def _sweep(self) -> None:
        for path in self._folder.glob("outrider-prefix-*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def _checksum(array: NDArray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
