"""Prompts of many kinds, written by rule: every one is a template whose slots are filled with seeded choices.

    prompts = write_prompts("maths", count=500, seed=0)

Kinds follow what people ask of small assistants: chat (letters, stories, explanations, advice, facts, translation,
summaries and questions over passages), maths word problems, and code. `passages` (any prose) feed the summaries and
the questions over passages. The target invents further ones itself (invent.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from outrider.distill.data import Prompt, distinct
from outrider.distill.prompt_foreign import FOREIGN
from outrider.distill.prompt_templates import FUNCTIONS, TEMPLATES
from outrider.distill.prompt_words import NUMBERS, WORDS

Rng = random.Random
SLOT = re.compile(r"\{(\w+)\}")


def write_prompts(domain: str, count: int, seed: int = 0, passages: Sequence[str] = ()) -> list[Prompt]:
    """`count` distinct prompts of a domain: chat, maths or code (fewer where the templates run out)."""
    rng = random.Random(f"{domain}-{seed}")
    makers = WRITERS[domain] if passages else [maker for maker in WRITERS[domain] if maker not in OVER_PASSAGES]
    drawn = (Prompt((("user", rng.choice(makers)(rng, passages)),), domain) for _ in range(4 * count))
    return distinct(drawn)[:count]


def fill(template: str, rng: Rng) -> str:
    """A template with its slots filled. A slot is drawn once, and {name} and {name2} differ."""

    drawn: dict[str, str] = {}

    def draw(match: re.Match[str]) -> str:
        slot = match[1]
        if slot not in drawn:
            words = _words(slot.rstrip("0123456789"))
            drawn[slot] = rng.choice([word for word in words if word not in drawn.values()] or words)
        return drawn[slot]

    text = SLOT.sub(draw, template)
    return text[0].upper() + text[1:]


def _words(kind: str) -> list[str]:
    return list(map(str, NUMBERS[kind])) if kind in NUMBERS else WORDS[kind]


def passages_of(prose: str, count: int, seed: int = 0, words: tuple[int, int] = (90, 320)) -> list[str]:
    """Stretches of whole paragraphs of a text, each of about a length drawn between two numbers of words."""
    rng = random.Random(f"passages-{seed}")
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", prose)]
    paragraphs = [block for block in paragraphs if len(block.split()) >= 12]
    return [_stretch(paragraphs, rng, rng.randint(*words)) for _ in range(count if paragraphs else 0)]


def _stretch(paragraphs: Sequence[str], rng: Rng, length: int) -> str:
    start, taken = rng.randrange(len(paragraphs)), []
    for block in (*paragraphs[start:], *paragraphs[:start]):
        taken += block.split()
        if len(taken) >= length:
            break
    return " ".join(taken[:length])


def _from(name: str) -> Callable[[Rng, Sequence[str]], str]:
    templates = TEMPLATES[name]
    return lambda rng, passages: fill(rng.choice(templates), rng)


def _translation(rng: Rng, passages: Sequence[str]) -> str:
    """A sentence of another language, put together from its own templates."""
    language = rng.choice(sorted(FOREIGN))
    sentences = [fill_foreign(language, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    return fill(rng.choice(TEMPLATES["translate"]), rng).replace("<language>", language) + " ".join(sentences)


def fill_foreign(language: str, rng: Rng) -> str:
    """One sentence of a language."""
    words = FOREIGN[language]
    return SLOT.sub(lambda match: rng.choice(words[match[1].rstrip("0123456789")]), rng.choice(words["sentence"]))


def _summary(rng: Rng, passages: Sequence[str]) -> str:
    return fill(rng.choice(TEMPLATES["summarize"]), rng) + rng.choice(passages)


def _question(rng: Rng, passages: Sequence[str]) -> str:
    """A question behind one or two passages."""
    context = "\n\n".join(rng.choice(passages) for _ in range(rng.choice((1, 1, 2))))
    return context + "\n\n" + fill(rng.choice(TEMPLATES["ask"]), rng)


def _function(rng: Rng, passages: Sequence[str]) -> str:
    """A signature with its docstring, to be completed."""
    name, arguments, returns, text = rng.choice(FUNCTIONS)
    header = f'def {name}({arguments}) -> {returns}:\n    """{text}\n    """\n'
    return rng.choice(TEMPLATES["complete"]).replace("<code>", header)


WRITERS: dict[str, list[Callable[[Rng, Sequence[str]], str]]] = {
    "chat": [*map(_from, ("write", "explain", "advise", "facts", "play", "list", "think")), _translation, _translation],
    "maths": [*map(_from, ("story_sums", "story_sums", "story_rates", "sums"))],
    "code": [*map(_from, ("program", "program", "explain_code")), _function],
}
OVER_PASSAGES = [_summary, _question]
WRITERS["chat"] += OVER_PASSAGES
