"""Keeps evaluation prompts out of training: their hashes, and a check of every prompt against them.

A text is known by the hash of its whole and by that of a stretch of twelve words inside it, so that an evaluation
prompt is found inside a longer one too. evaluation_hashes.txt holds the hashes of Spec-Bench, of GSM8K's test split
and of HumanEval; the texts themselves are no part of this project. scripts/hash_evaluation.py wrote it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

WORDS = 12  # of a stretch
SKIPPED = 2  # words before the stretch: task prefixes such as "Summarize:" are shared by many prompts
HASH = 16  # hexadecimal digits kept


def words_of(text: str) -> list[str]:
    """A text as lower-case words: spacing, case and punctuation do not matter."""
    return re.findall(r"\w+", text.lower())


def fingerprints(text: str) -> set[str]:
    """What an evaluation text is known by: its whole, and a stretch of it where it is long enough."""
    words = words_of(text)
    found = {_hash(words)}
    start = min(SKIPPED, len(words) - WORDS)
    return found | {_hash(words[start : start + WORDS])} if start >= 0 else found


def is_evaluation(text: str, known: frozenset[str] | None = None) -> bool:
    """Whether a text is, or holds, an evaluation prompt. `known`: hashes to look for; None: the packaged ones."""
    known = evaluation_hashes() if known is None else known
    words = words_of(text)
    stretches = (words[i : i + WORDS] for i in range(len(words) - WORDS + 1))
    return _hash(words) in known or any(_hash(stretch) in known for stretch in stretches)


@cache
def evaluation_hashes() -> frozenset[str]:
    """The packaged hashes."""
    text = files("outrider.distill").joinpath("evaluation_hashes.txt").read_text(encoding="ascii")
    return frozenset(text.split())


def hashes_of(texts: Iterable[str]) -> list[str]:
    """Fingerprints of many texts, for the packaged file."""
    return sorted(set().union(*(fingerprints(text) for text in texts)))


def _hash(words: list[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:HASH]
