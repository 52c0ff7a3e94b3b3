"""Files of a run: written whole or not at all, with a checksum beside them, and read only when it holds.

Nothing is pickled: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.errors import CapacityError, ChecksumError, ModelError

CHUNK = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` only when the block ends well. CapacityError on a full disk."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with full_disk_told(path):
            yield partial
            _sync(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def full_disk_told(path: Path) -> Iterator[None]:
    """Turn a full disk, while `path` is written, into a CapacityError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _is_full(error):
            message = f"{path.parent} has no space left for {path.name}; free some and run the same command again"
            raise CapacityError(message) from None
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """A JSON file's value; None where there is no file. ModelError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not readable JSON ({error}); remove it and run the same command again") from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
    """Replace a safetensors file; `note` (JSON-ready) is kept in its header, the checksum in a file beside it."""
    with replacing(path) as partial:
        save_file({name: t.contiguous() for name, t in tensors.items()}, partial, {"note": json.dumps(note)})
        digest = digest_of(partial)
    with replacing(_beside(path)) as partial:
        partial.write_text(digest + "\n", encoding="ascii")


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and note of a file that write_tensors wrote. ChecksumError where it is not as it was written."""
    check_digest(path)
    with safe_open(path, "pt") as file:
        note = json.loads(file.metadata()["note"])
        return {name: file.get_tensor(name) for name in file.keys()}, note  # noqa: SIM118 - not a mapping


def read_note(path: Path) -> dict[str, Any]:
    """The note alone, without checking the whole file."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["note"])
    except (SafetensorError, OSError, KeyError, TypeError):
        raise _damaged(path) from None


def check_digest(path: Path) -> None:
    """ChecksumError unless the file is there and is what was written."""
    try:
        expected = _beside(path).read_text(encoding="ascii").strip()
        found = digest_of(path)
    except FileNotFoundError:
        raise _damaged(path) from None
    if found != expected:
        raise _damaged(path)


def is_written(path: Path) -> bool:
    """Whether a file and its checksum are there."""
    return path.exists() and _beside(path).exists()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _damaged(path: Path) -> ChecksumError:
    return ChecksumError(f"{path} is missing or damaged (SHA-256); remove it and run the same command again")


def _is_full(error: Exception) -> bool:
    """Whether the disk or the quota is full; safetensors wraps the system's error in its text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "os error 28" in str(error) or "os error 122" in str(error)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
