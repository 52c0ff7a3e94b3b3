"""The ablation: plain, every drafter alone, then vote, length and pipeline, by the published rules and by ours.

    outrider bench speed smollm2-135m --ablation ngram,suffix,heads --concurrency 1,8

All rows are measured in turns in one run on the same mixed stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.simulate import PUBLISHED
from outrider.bench.speed import Mode
from outrider.errors import ConfigError

FIXED, MOST = 4, 8  # tokens per draft: of the fixed lengths, and at most of the adaptive ones
_CHAINS = {"published": ("majority", "trend", [1, MOST]), "ours": ("hedge", "goodput", [0, MOST])}
_STEPS = ("+ vote", "+ length", "+ pipeline")


def parse_drafter(word: str) -> str | dict[str, str]:
    """A drafter as typed: a name, a model's path or alias, or head=PATH and model=PATH."""
    name, given, path = word.partition("=")
    if not given:
        return word
    if name not in ("head", "model") or not path:
        raise ConfigError(f"--ablation: {word!r} is refused; use a name, head=PATH or model=PATH", "--ablation")
    return {"name": name, "path": path}


def ablation_modes(words: Sequence[str]) -> list[Mode]:
    """All rows for these drafters."""
    drafters = [parse_drafter(word) for word in words]
    modes = [Mode("plain", None)]
    for word, drafter in zip(words, drafters, strict=True):
        modes.append(Mode(f"one: {word}", {"drafters": [drafter], "num_speculative_tokens": FIXED}))
    for rules, (vote, length, bounds) in _CHAINS.items():
        voted: dict[str, Any] = {"drafters": drafters, "vote": vote, "num_speculative_tokens": FIXED}
        adaptive = {**voted, "length": length, "num_speculative_tokens": bounds}
        flow = "published" if rules == "published" else "little"
        steps = (voted, adaptive, {**adaptive, "pipeline": True, "flow": flow})
        modes += [Mode(f"{step} ({rules})", config) for step, config in zip(_STEPS, steps, strict=True)]
    return [*modes, Mode("auto", "auto")]


def ablation_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each step gained over the one before, per concurrency, on the mixed stream; the paper's gains beside it.

    The step before the vote is the best single drafter: a static choice made with hindsight.
    """
    table: list[dict[str, Any]] = []
    for level in dict.fromkeys(row["concurrency"] for row in rows):
        speeds = {
            row["mode"]: row["decode_tokens_per_second"]
            for row in rows
            if (row["concurrency"], row["task"]) == (level, "mixed")
        }
        best = max((speed for mode, speed in speeds.items() if mode.startswith("one: ")), default=speeds["plain"])
        last = {rules: best for rules in _CHAINS}
        for mode, speed in speeds.items():
            step, _, rules = mode.rstrip(")").partition(" (")
            before = last.get(rules, speeds["plain"])
            last[rules] = speed
            paper = PUBLISHED.get(step)
            table.append(
                {
                    "concurrency": level,
                    "mode": mode,
                    "over_plain": speed / speeds["plain"],
                    "over_best_single": speed / best,
                    "gain_percent": 100 * (speed / before - 1) if rules else None,
                    "paper_percent": None if paper is None else " / ".join(f"{gain:+.1f}" for gain in paper),
                }
            )
    return table
