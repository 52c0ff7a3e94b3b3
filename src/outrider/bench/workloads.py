"""Prompts for benchmarks: the six tasks of Spec-Bench from a folder of data, or a small set of the project's own.

The data is never part of the project: `--data` or OUTRIDER_DATA names a folder with spec_bench.jsonl (task, turns).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from outrider.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One user message and the kind of task it is."""

    task: str
    text: str


#: What is measured where there is no data folder: short, of several kinds, written for this project.
OWN = Path(__file__).with_name("prompts.jsonl")


def data_folder(given: str | None) -> Path | None:
    """The folder that an option or OUTRIDER_DATA names; None where neither does."""
    name = given or os.environ.get("OUTRIDER_DATA")
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"the data folder {name!r} does not exist; give --data or OUTRIDER_DATA a folder", "data")
    return folder


def load_prompts(data: str | None, tasks: Sequence[str] | None, per_task: int | None) -> list[Prompt]:
    """Prompts of the wanted tasks, interleaved so that the stream is mixed."""
    folder = data_folder(data)
    prompts = read_prompts(OWN if folder is None else folder / "spec_bench.jsonl")
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    for task in tasks or ():
        if task not in known:
            raise ConfigError.unknown(task, known, "--tasks")
    wanted = [[p for p in prompts if p.task == task][:per_task] for task in tasks or known]
    return interleave(wanted)


def read_prompts(path: Path) -> list[Prompt]:
    """The first turns of a file in the form of Spec-Bench: one JSON object a line with task and turns."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give --data a folder with it", "data") from None
    return [Prompt(row["task"], row["turns"][0]) for row in map(json.loads, lines)]


def interleave(groups: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """One of each group in turn."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]
