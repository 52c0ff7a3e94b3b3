"""One question of an evaluation and how its answer is scored; fitting text to a length in tokens.

Builders (eval_needles.py, eval_retrieval.py) are pure functions of texts, a length, a depth and a seed: no model, no
files. `count` gives the tokens of a text under the model's own tokenizer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError

Count = Callable[[str], int]

_MARKS = string.punctuation.replace("-", "")
MARKS = str.maketrans(_MARKS, " " * len(_MARKS))


@dataclass(frozen=True)
class Case:
    """A prompt, and what a right answer contains. Every group counts once, by any one of its spellings."""

    task: str
    prompt: str
    answers: tuple[tuple[str, ...], ...]
    max_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)  # depth, length and so on, for tables and pictures

    def score(self, text: str) -> float:
        """Share of the answer groups that the text contains, after normalising both; 0 to 1."""
        said = f" {normalise(text)} "
        found = [any(f" {normalise(spelling)} " in said for spelling in group) for group in self.answers]
        return sum(found) / len(found)


def normalise(text: str) -> str:
    """Lower case, no articles, punctuation as spaces, single spaces: as question answering is usually scored."""
    plain = text.lower().translate(MARKS)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a long text, line breaks inside them removed; very short ones (headings) are left out."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if len(part) > 40]


def fill(parts: Sequence[str], tokens: int, count: Count, start: int = 0) -> list[str]:
    """Paragraphs from `start` on, as many as fit into `tokens`; begins again where the text ends."""
    if not parts:
        raise ConfigError("the filler text has no paragraphs; give a longer one", "data")
    chosen: list[str] = []
    used, at = 0, start % len(parts)
    while True:
        cost = count(parts[at]) + 2
        if used + cost > tokens:
            return chosen
        chosen.append(parts[at])
        used += cost
        at = (at + 1) % len(parts)


def insert(parts: Sequence[str], items: Sequence[tuple[float, str]]) -> list[str]:
    """Put items between the paragraphs at their depths (0 begin, 1 end), keeping the order of equal depths."""
    placed = sorted(items, key=lambda item: item[0])
    result: list[str] = []
    taken = 0
    for index in range(len(parts) + 1):
        while taken < len(placed) and round(placed[taken][0] * len(parts)) <= index:
            result.append(placed[taken][1])
            taken += 1
        result.extend(parts[index : index + 1])
    return result


def spread(count: int, first: float = 0.0, last: float = 1.0) -> list[float]:
    """`count` depths evenly from first to last; the middle for one."""
    if count == 1:
        return [(first + last) / 2]
    return [first + (last - first) * i / (count - 1) for i in range(count)]
