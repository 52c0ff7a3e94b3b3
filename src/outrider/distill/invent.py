"""Prompts that the target writes itself: given the beginning of a user's turn, it goes on as users of its training did.

Source: Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing"
(arXiv 2406.08464).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from outrider.distill.data import Prompt
from outrider.distill.guard import is_evaluation
from outrider.distill.target import Job, Target
from outrider.errors import ConfigError
from outrider.types import SamplingParams

WORDS = (3, 160)  # of a usable prompt
TRIES = 6  # texts for each prompt that is wanted, at most: some do not end, some repeat others
CODE = re.compile(
    r"\b(python|javascript|java|c\+\+|sql|html|code|function|algorithm|script|class|program|regex)\b", re.I
)
MATHS = re.compile(r"\b(how many|how much|calculate|solve|equation|percent|sum of|average|total|perimeter)\b", re.I)


#: How the user begins. Left to itself ("") the target seldom asks for the completion of a function, or a translation.
OPENINGS = (
    "",
    "",
    "def",
    "from typing import List\n\n\ndef",
    "Write a Python function that",
    "Write a program in",
    "Translate German to English:",
    "Translate this sentence to English:",
    "Summarize:",
    "Who",
    "Where",
    "When was",
    "How many",
    "Imagine you are",
    "Given the following",
)


def invent_prompts(
    target: Target,
    count: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda _: None,
    openings: Sequence[str] = ("",),
) -> list[Prompt]:
    """`count` distinct prompts in the target's words, behind the openings in turns; fewer where it repeats itself."""
    prefix = user_prefix(target)
    begun = [(*prefix, *target.tokenizer.encode(opening, add_special=False)) for opening in openings or ("",)]
    params = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 220}
    jobs = (
        Job(i, begun[i % len(begun)], SamplingParams(**params, seed=seed * 1_000_003 + i))  # type: ignore[arg-type]
        for i in range(TRIES * count)
    )
    found: dict[str, Prompt] = {}
    for text in _texts(target, jobs, len(prefix)):
        if usable(text) and not is_evaluation(text):
            found.setdefault(text, Prompt((("user", text),), domain_of(text)))
            report(len(found))
        if len(found) >= count:
            break
    return list(found.values())


def user_prefix(target: Target) -> tuple[int, ...]:
    """Token ids up to where a user's first message begins: what the renderings of two messages have in common."""
    if not target.tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template, so it cannot invent prompts; write them to a file")
    first, second = (target.encode(Prompt((("user", text),))) for text in ("Alpha", "7 Zebras"))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[:shared]


def usable(text: str) -> bool:
    """Whether a text can pass for a user's message."""
    words = text.split()
    return WORDS[0] <= len(words) <= WORDS[1] and "�" not in text and len(set(words)) > 0.4 * len(words)


def domain_of(text: str) -> str:
    """The kind of task that a message asks for, by its words."""
    if CODE.search(text) or "def " in text:
        return "code"
    return "maths" if MATHS.search(text) and re.search(r"\d", text) else "chat"


def _texts(target: Target, jobs: Iterator[Job], first: int) -> Iterator[str]:
    """What stands behind the first tokens of every job that came to an end."""
    for _, answer in target.answers(jobs):
        ids = answer.tokens[first:]
        if ids and ids[-1] in target.spec.eos_token_ids:
            yield target.tokenizer.decode(ids).strip()
