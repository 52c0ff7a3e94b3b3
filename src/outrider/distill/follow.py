"""Prompts of a second round: what the target said becomes an earlier turn, or a text to be read.

Users answer back, and ask about texts. Prompts of one turn never teach a head to draft from what stands further up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.distill.data import Prompt, distinct
from outrider.distill.guard import is_evaluation
from outrider.distill.prompt_templates import TEMPLATES
from outrider.distill.prompts import Rng, fill

TURNS = 0.5  # share of the prompts that go on a conversation; the others are about texts
TEXT_WORDS = 60  # of an answer that can stand for a text
TEXTS = (1, 1, 1, 2, 2, 3)  # in one prompt

#: A prompt and what the target answered to it.
Spoken = tuple[Prompt, str]


def follow_prompts(spoken: Sequence[Spoken], count: int, seed: int = 0) -> list[Prompt]:
    """`count` distinct prompts that lean on earlier answers; fewer where there are too few answers."""
    rng = random.Random(f"follow-{seed}")
    texts = [text for prompt, text in spoken if prompt.domain == "chat" and len(text.split()) >= TEXT_WORDS]
    drawn = (_drawn(rng, spoken, texts) for _ in range(2 * count if texts else 0))
    return distinct(prompt for prompt in drawn if not is_evaluation(prompt.text))[:count]


def _drawn(rng: Rng, spoken: Sequence[Spoken], texts: Sequence[str]) -> Prompt:
    return _turn(rng, *rng.choice(spoken)) if rng.random() < TURNS else _about(rng, texts)


def _turn(rng: Rng, asked: Prompt, text: str) -> Prompt:
    """The user goes on: a follow-up of the conversation's kind."""
    further = fill(rng.choice(TEMPLATES[f"further_{asked.domain}"]), rng)
    return Prompt((*asked.messages, ("assistant", text), ("user", further)), asked.domain)


def _about(rng: Rng, texts: Sequence[str]) -> Prompt:
    """A summary of a text, or a question before or behind a few of them."""
    chosen = "\n\n".join(rng.choice(texts) for _ in range(rng.choice(TEXTS)))
    if rng.random() < 0.5:
        return Prompt((("user", fill(rng.choice(TEMPLATES["summarize"]), rng) + chosen),))
    question = fill(rng.choice(TEMPLATES["ask"] + TEMPLATES["facts"]), rng)
    return Prompt((("user", f"{chosen}\n\n{question}"),))
