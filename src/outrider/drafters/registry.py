"""Drafters by name: the built-in ones, those of other packages, and models by path.

A drafter is named by a string ("ngram"), a table ({"name": "ngram", "max_n": 3}) or a model (path, hub id, alias).
A package adds one with the entry point group "outrider.drafters":

    [project.entry-points."outrider.drafters"]
    mine = "my_package.drafter:MyDrafter"

where `MyDrafter.Options` is a frozen dataclass and `MyDrafter.build(options, host)` gives the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from outrider.config import from_mapping, named_options
from outrider.drafters.base import Drafter
from outrider.drafters.host import Host
from outrider.errors import ConfigError
from outrider.models.load.catalogue import CATALOGUE
from outrider.models.spec import DecoderSpec

GROUP = "outrider.drafters"

#: Built-in drafters: imported when asked for, so that `ngram` does not pay for `head`.
BUILTIN = {
    "ngram": "outrider.drafters.ngram:NgramDrafter",
    "suffix": "outrider.drafters.suffix:SuffixDrafter",
    "model": "outrider.drafters.model:ModelDrafter",
    "head": "outrider.drafters.head:HeadDrafter",
    "sparse_self": "outrider.drafters.sparse_self:SparseSelfDrafter",
}


class DrafterType(Protocol):
    """What a name stands for: the kind of its options, and how to build it from them."""

    Options: type[Any]

    def build(self, options: Any, host: Host) -> Drafter:
        """A drafter of these options. ConfigError where the host cannot carry it."""
        ...


def create_drafters(entries: Sequence[Any], host: Host) -> list[Drafter]:
    """One drafter per entry, with distinct names: the second "model" becomes "model-2"."""
    drafters = [create_drafter(entry, host) for entry in entries]
    taken: set[str] = set()
    for drafter in drafters:
        drafter.name = _distinct(drafter.name, taken)
        taken.add(drafter.name)
    return drafters


def create_drafter(entry: Any, host: Host) -> Drafter:
    """The drafter that a name, model path or table {"name": ..., options} asks for; an object is taken as it is."""
    if hasattr(entry, "propose"):
        return entry
    name, options = _read(entry)
    kind = find(name)
    return kind.build(from_mapping(kind.Options, options, f"drafter {name!r}"), host)


def needed_taps(entries: Sequence[Any], target: DecoderSpec) -> tuple[int, ...]:
    """The layers of the target whose states the drafters need, ascending: to be known before the target is built."""
    taps: set[int] = set()
    for entry in entries:
        if hasattr(entry, "propose"):
            taps.update(getattr(entry, "taps", ()))
            continue
        name, options = _read(entry)
        if name == "head" and isinstance(options.get("path"), str):
            from outrider.drafters.head import head_taps  # only who uses a head pays for importing it

            taps.update(head_taps(options["path"], target))
    return tuple(sorted(taps))


def names() -> list[str]:
    """All drafters that can be named here."""
    return sorted({*BUILTIN, *_third_party()})


def find(name: str) -> DrafterType:
    """The type behind a name; unknown names are refused with the nearest known one."""
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        return getattr(import_module(module), attribute)
    third = _third_party()
    if name in third:
        return _load(name, third[name])
    near = get_close_matches(name, names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
    raise ConfigError(f"unknown drafter {name!r}; {hint} (a model is given by its path or hub id)", "drafters")


def _read(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """(name, options) of an entry as a user typed it."""
    if isinstance(entry, str) and _is_model(entry):
        return "model", {"path": entry}
    named = named_options(entry)
    if named is not None:
        return named
    raise ConfigError(f'drafter {entry!r} is refused; use a name, a model path or {{"name": ..., options}}', "drafters")


def _is_model(name: str) -> bool:
    """Whether a name means a model: an alias, a path or a hub id."""
    if name in CATALOGUE or "/" in name or name.endswith(".gguf"):
        return True
    return name not in BUILTIN and Path(name).is_dir()


def _distinct(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    return next(f"{name}-{i}" for i in range(2, len(taken) + 3) if f"{name}-{i}" not in taken)


def _third_party() -> dict[str, Callable[[], Any]]:
    return {point.name: point.load for point in entry_points(group=GROUP)}


def _load(name: str, load: Callable[[], Any]) -> DrafterType:
    try:
        kind = load()
    except Exception as error:
        raise ConfigError(f"drafter {name!r} cannot be imported: {error}", "drafters") from error
    if not hasattr(kind, "Options") or not hasattr(kind, "build"):
        raise ConfigError(f"drafter {name!r} lacks `Options` or `build`; see CONTRIBUTING.md", "drafters")
    return kind
