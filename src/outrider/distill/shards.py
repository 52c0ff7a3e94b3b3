"""Captured answers on disk: bounded safetensors files with checksums, and sequences read from them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from outrider.distill.files import check_digest, is_written, read_note, write_tensors
from outrider.distill.target import Answer
from outrider.errors import ChecksumError


@dataclass(frozen=True)
class Entry:
    """Where one captured sequence is, and what it is."""

    shard: int
    start: int  # of its tokens in the shard
    states_start: int
    length: int  # tokens, prompt and answer
    prompt_length: int
    domain: str
    held_out: bool
    key: int  # of its prompt

    @property
    def rows(self) -> int:
        """Slots that can be trained on: the first draft follows the answer's first token, the last needs a teacher."""
        return max(0, self.length - 1 - self.prompt_length)


class ShardWriter:
    """Writes numbered shards of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"answers-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """Whether a shard is complete."""
        return is_written(self.path(number))

    def write(self, number: int, answers: Sequence[Answer], facts: Sequence[dict[str, Any]]) -> None:
        """Write one shard; `facts` are the entry's fields that the answers do not tell (domain, held_out, key)."""
        tensors = {
            "tokens": torch.tensor([token for answer in answers for token in answer.tokens], dtype=torch.int32),
            "states": torch.from_numpy(np.concatenate([answer.states for answer in answers], axis=1)),
        }
        sequences = [
            {"length": len(answer.tokens), "prompt_length": answer.prompt_length, **fact}
            for answer, fact in zip(answers, facts, strict=True)
        ]
        write_tensors(self.path(number), tensors, {"sequences": sequences})


class Answers:
    """All captured sequences of some folders. Shards are mapped, so memory holds only what is in use."""

    def __init__(self, *folders: Path, verify: bool = True) -> None:
        """ChecksumError names a damaged shard; `verify` False skips reading all of them."""
        self.paths = [path for folder in folders for path in _shards(folder)]
        for path in self.paths if verify else ():
            check_digest(path)
        self.entries = [entry for number, path in enumerate(self.paths) for entry in _entries(number, path)]

    @cached_property
    def _files(self) -> list[Any]:
        return [safe_open(path, "pt") for path in self.paths]

    def tokens(self, entry: Entry) -> Tensor:
        """int64 [length]."""
        stop = entry.start + entry.length
        return self._files[entry.shard].get_slice("tokens")[entry.start : stop].long()

    def states(self, entry: Entry) -> Tensor:
        """fp32 [layers, length - 1, hidden]."""
        stop = entry.states_start + entry.length - 1
        return self._files[entry.shard].get_slice("states")[:, entry.states_start : stop].float()

    def training(self) -> list[Entry]:
        """Sequences to train on."""
        return [entry for entry in self.entries if not entry.held_out and entry.rows]

    def held_out(self, per_domain: int) -> list[Entry]:
        """Sequences to evaluate on, at most so many of each domain."""
        kept: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if entry.held_out and entry.rows:
                kept.setdefault(entry.domain, []).append(entry)
        return [entry for domain in sorted(kept) for entry in kept[domain][:per_domain]]


def _shards(folder: Path) -> list[Path]:
    """The shards of one folder, in their order."""
    paths = sorted(folder.glob("answers-*.safetensors"))
    if not paths:
        raise ChecksumError(f"{folder} holds no captured answers; run `outrider distill` on it again")
    return paths


def _entries(number: int, path: Path) -> list[Entry]:
    entries, start, states_start = [], 0, 0
    for fields in read_note(path)["sequences"]:
        entries.append(Entry(shard=number, start=start, states_start=states_start, **fields))
        start += fields["length"]
        states_start += fields["length"] - 1
    return entries
