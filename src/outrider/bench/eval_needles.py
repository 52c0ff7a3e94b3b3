"""Needles in a haystack (single, several, needed late) and variable tracking, after RULER (arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from outrider.bench.eval_cases import Case, Count, fill, insert, spread

PLACES = (
    "Lisbon", "Oslo", "Quito", "Hanoi", "Tunis", "Perth", "Riga", "Lima", "Osaka", "Turin", "Dakar", "Split",
    "Baku", "Cork", "Delhi", "Essen",
)  # fmt: skip
INTRODUCTION = "Some special magic numbers are hidden in the following text. Memorize them.\n\n"


def needle_single(parts: Sequence[str], length: int, depth: float, count: Count, seed: int = 0) -> Case:
    """One number at one depth."""
    return _needles("needle_single", parts, length, [depth], 1, count, seed)


def needle_multi(parts: Sequence[str], length: int, needles: int, count: Count, seed: int = 0) -> Case:
    """Several numbers at even depths, all of them asked for."""
    return _needles("needle_multi", parts, length, spread(needles, 0.05, 0.95), needles, count, seed)


def needle_late(parts: Sequence[str], length: int, depth: float, count: Count, seed: int = 0) -> Case:
    """One number among three that is needed only after a list has been written out.

    What matters to the answer is not what mattered to the question: a selection made at the prompt's end is too old.
    """
    rng = random.Random(seed)
    places, numbers = _draw(rng, 3)
    question = (
        "\n\nFirst write the days of the week from Monday to Sunday, one per line. After the last one write: "
        f"The special magic number for {places[0]} is"
    )
    depths = [depth, 0.3, 0.7]
    body = _bury(parts, length, list(zip(depths, map(_sentence, places, numbers), strict=True)), question, count, seed)
    return Case("needle_late", body, ((numbers[0],),), 80, {"depth": depth, "length": length, "seed": seed})


def variable_tracking(
    parts: Sequence[str], length: int, hops: int, count: Count, seed: int = 0, chains: int = 2
) -> Case:
    """A value handed from variable to variable; name all variables of the first chain."""
    rng = random.Random(seed)
    names = rng.sample([a + b + c for a in "BCDFG" for b in "AEIOU" for c in "KLMNP"], chains * (hops + 1))
    values = rng.sample(range(10000, 99999), chains)
    items: list[tuple[float, str]] = []
    for chain in range(chains):
        own = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        lines = [f"VAR {own[0]} = {values[chain]}."]
        lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(own)]
        items += zip(spread(len(lines), 0.05 + 0.02 * chain, 0.9 + 0.02 * chain), lines, strict=True)
    question = (
        f"\n\nQuestion: Find all variables that are assigned the value {values[0]}, directly or through another "
        f"variable. There are {hops + 1} of them.\nAnswer: The variables are"
    )
    opening = "Memorize the chains of variable assignment hidden in the following text.\n\n"
    body = _bury(parts, length, items, question, count, seed, opening)
    answers = tuple((name,) for name in names[: hops + 1])
    return Case("variable_tracking", body, answers, 8 * (hops + 1), {"hops": hops, "length": length, "seed": seed})


def _needles(
    task: str, parts: Sequence[str], length: int, depths: Sequence[float], asked: int, count: Count, seed: int
) -> Case:
    rng = random.Random(seed)
    places, numbers = _draw(rng, asked)
    wanted = " and ".join(places)
    many = asked > 1
    question = (
        f"\n\nQuestion: What {'are' if many else 'is'} the special magic number{'s' * many} for {wanted} mentioned in "
        f"the text?\nAnswer: The special magic number{'s' * many} for {wanted} mentioned in the text "
        f"{'are' if many else 'is'}"
    )
    items = list(zip(depths, map(_sentence, places, numbers), strict=True))
    body = _bury(parts, length, items, question, count, seed)
    facts = {"depth": depths[0] if asked == 1 else None, "length": length, "seed": seed}
    return Case(task, body, tuple((number,) for number in numbers), 12 * asked + 8, facts)


def _draw(rng: random.Random, needles: int) -> tuple[list[str], list[str]]:
    """Distinct places and seven-digit numbers."""
    return rng.sample(PLACES, needles), [str(n) for n in rng.sample(range(1_000_000, 9_999_999), needles)]


def _sentence(place: str, number: str) -> str:
    return f"One of the special magic numbers for {place} is: {number}."


def _bury(
    parts: Sequence[str],
    length: int,
    items: Sequence[tuple[float, str]],
    question: str,
    count: Count,
    seed: int,
    opening: str = INTRODUCTION,
) -> str:
    """Opening, filler with the items in it, question: `length` tokens at most."""
    own = count(opening) + count(question) + sum(count(text) + 2 for _, text in items)
    filler = fill(parts, max(0, length - own), count, start=seed * 37)
    return opening + "\n\n".join(insert(filler, items)) + question
