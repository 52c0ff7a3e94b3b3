"""The folder for fetched models: OUTRIDER_CACHE, else the platform's cache folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from outrider.errors import CapacityError, ModelError

VARIABLE = "OUTRIDER_CACHE"


def cache_folder(given: str | Path | None = None) -> Path:
    """Where models are kept: the given folder, else $OUTRIDER_CACHE, else the platform's place for caches."""
    chosen = given or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else _platform_cache() / "outrider"


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_folder(folder: Path) -> Path:
    """Create a folder of the cache. ModelError where that is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be created ({error.strerror}); set {VARIABLE} to a folder you own") from None
    return folder


def require_space(folder: Path, needed: int) -> None:
    """CapacityError where the folder's disk has fewer than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"{folder} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; "
            f"free some space or set {VARIABLE} to another disk"
        )
