"""Heads that come with the package: found by what the target is, not by what it is called.

    heads/<target>/<name>/     config.json, head.q8.safetensors, card.json (the target's identity), README.md

In a configuration, "heads" stands for all heads of the target, and the name of one may stand for its folder:

    {"drafters": ["ngram", "heads"]}
    {"drafters": [{"name": "head", "path": "maths"}]}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.config import SpeculativeConfig, from_mapping
from outrider.errors import ConfigError, ModelError
from outrider.models.eagle3_store import install_compact
from outrider.models.identity import Model, identity
from outrider.models.load.json_file import read_json

log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1] / "heads"
CARD = "card.json"
HEADS = "heads"

#: In "auto": the generalist, where there is one. Every further head costs a pass over all that is committed, which
#: specialists did not earn back (docs/measurements.md).
ANY_HEADS: Mapping[str, Any] = {"name": HEADS, "first": 1, "required": False}


@dataclass(frozen=True)
class _Heads:
    """What "heads" takes itself; everything else is for each head."""

    required: bool = True  # refuse a model that no heads come with
    first: int | None = None  # only so many of them; the generalist comes first

    def __post_init__(self) -> None:
        if self.first is not None and self.first < 1:
            raise ConfigError(f"heads: first = {self.first} is refused; use 1 or more", "drafters")


def shipped_heads(target: Model, root: Path | None = None) -> dict[str, Path]:
    """Folders of the heads that were trained for this very model, by name; the generalist first.

    A damaged card costs its own head and a line in the log, never the start of a model.
    """
    folders = sorted((card.parent for card in (root or ROOT).glob(f"*/*/{CARD}")), key=_order)
    own = identity(target) if folders else ""
    return {folder.name: folder for folder in folders if _target_of(folder) == own}


def install_head(source: Path, target: Model, folder: Path) -> None:
    """Put a distilled head, in its compact form, where `shipped_heads` finds it: folder = ROOT / target / name."""
    install_compact(source, folder, target.spec)
    (folder / CARD).write_text(json.dumps({"target_identity": identity(target)}, indent=1) + "\n", encoding="utf-8")


def with_heads(config: SpeculativeConfig | None, heads: Mapping[str, Path]) -> SpeculativeConfig | None:
    """The configuration with "heads" and names of heads spelt out as folders."""
    if config is None:
        return None
    return replace(config, drafters=tuple(one for entry in config.drafters for one in _spell(entry, heads)))


def _target_of(folder: Path) -> str | None:
    """The identity of the model that a head was trained for; None where its card cannot be read."""
    try:
        return str(read_json(folder / CARD).get("target_identity"))
    except ModelError as error:
        log.warning("the head in %s is left out: %s", folder, error)
        return None


def _order(folder: Path) -> tuple[bool, str]:
    return folder.name != "generalist", folder.name


def _spell(entry: Any, heads: Mapping[str, Path]) -> Sequence[Any]:
    """One entry of `drafters` as those that it stands for."""
    if entry == HEADS:
        return _all(heads, {}, _Heads())
    if not isinstance(entry, Mapping):
        return [entry]
    options = dict(entry)
    name = options.pop("name", None)
    if name == HEADS:
        own = {key: options.pop(key) for key in ("path", "required", "first") if key in options}
        return _all(heads, options, from_mapping(_Heads, own, "drafter 'heads'"))
    path = options.get("path")
    if name == "head" and isinstance(path, str) and not Path(path).exists():
        if path in heads:
            return [{**entry, "path": str(heads[path])}]
        known = f"; this model has {', '.join(heads)}" if heads else ""
        raise ModelError(f"there is no head {path!r}: give the folder of an EAGLE-3 head{known}")
    return [entry]


def _all(heads: Mapping[str, Path], options: Mapping[str, Any], own: _Heads) -> list[dict[str, Any]]:
    if own.required and not heads:
        raise ConfigError(
            'drafter "heads": no heads come with this model; distil one (docs/distillation.md) and give '
            '{"name": "head", "path": FOLDER}',
            "drafters",
        )
    return [{"name": "head", "path": str(folder), **options} for folder in list(heads.values())[: own.first]]
