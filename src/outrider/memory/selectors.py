"""Selectors by name, as drafters are named: "pages", a folder, or {"name": "head", "path": FOLDER}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import ContextConfig, from_mapping, named_options
from outrider.errors import ConfigError

WHERE = "context_config.selector"


#: Full steps that an answer begins with, by selector, where a configuration names no number.
_FIRST_FULL = {"pages": 4, "window": 0, "head": 1}


def full_steps(config: ContextConfig) -> int:
    """Decoding steps of an answer that read everything before the first selection; none where drafts alone select."""
    if config.first_full is not None:
        return config.first_full
    return 0 if config.mode == "lossless" else _FIRST_FULL[read_selector(config.selector).name]


@dataclass(frozen=True)
class NoOptions:
    """A selector that has none."""


@dataclass(frozen=True)
class HeadOptions:
    """Options of the `head` selector."""

    path: str = ""  # folder of an EAGLE-3 head of this target; the same folder may draft too

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError('selector "head" needs a path: {"name": "head", "path": FOLDER}', "selector")


KINDS: Mapping[str, type[NoOptions] | type[HeadOptions]] = {
    "pages": NoOptions,
    "window": NoOptions,
    "head": HeadOptions,
}


@dataclass(frozen=True)
class Choice:
    """A selector that somebody asked for."""

    name: str
    path: str | None = None  # of a retrieval head


def read_selector(entry: Any) -> Choice:
    """What a name, a head's folder or a table {"name": ..., options} asks for; anything else is refused by name."""
    name, options = _read(entry)
    if name not in KINDS:
        raise ConfigError.unknown(name, KINDS, WHERE)
    made = from_mapping(KINDS[name], options, f"selector {name!r}")
    return Choice(name, made.path if isinstance(made, HeadOptions) else None)


def _read(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str) and entry not in KINDS and ("/" in entry or Path(entry).is_dir()):
        return "head", {"path": entry}
    named = named_options(entry)
    if named is not None:
        return named
    raise ConfigError(
        f'{WHERE} = {entry!r} is refused; use "pages", "window", or {{"name": "head", "path": FOLDER}}', "selector"
    )
