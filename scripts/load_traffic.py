"""What the clients of scripts/load.py ask: a mix of requests, some of them with known answers, and malformed ones."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORDS = re.findall(
    r"\w+", "river stone lamp seven quiet engine letters over the of and runs blue table counts slowly back"
)
HEADS = {"story": "Once upon a time", "code": "def main():\n    #", "list": "1. one\n2. two\n3.", "edit": ""}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
MALFORMED: tuple[tuple[bytes, str], ...] = (
    (b"{", "application/json"),
    (b'{"prompt": "x", "unknown_field": 1}', "application/json"),
    (b'{"prompt": "x", "temperature": "hot"}', "application/json"),
    (b'{"prompt": "x", "n": 100000}', "application/json"),
    (b'{"prompt": "\xff"}', "application/json"),
    (b"[" * 5000, "application/json"),
    (b'{"prompt": "x"}', "text/plain"),
    (b'{"prompt": "x", "max_tokens": 100000000}', "application/json"),
)


@dataclass
class Reference:
    """A prompt whose answer is known from when it was alone, without speculation.

    settled: whether drafts leave the answer as it is. A selection is made once per verified block, so the sparse answer
    to a long prompt is compared without drafts; everything else is compared with them.
    """

    name: str
    body: dict[str, Any]
    settled: bool
    answer: Sequence[int] = ()


@dataclass(frozen=True)
class Ask:
    """One well-formed request, and what its answer has to be where that is known."""

    body: dict[str, Any]
    reference: Reference | None = None

    @property
    def stream(self) -> bool:
        """Whether the answer is asked for piece by piece."""
        return bool(self.body.get("stream"))

    @property
    def kind(self) -> str:
        """How the answer is compared, for the record."""
        drafts = "off" if self.body.get("speculative") is False else "on"
        return f"{self.reference.name}, speculation {drafts}" if self.reference else "unknown"


class Traffic:
    """Makes requests. `context` is the server's own configuration of what attention reads."""

    def __init__(self, seed: int, long_prompt: int, max_tokens: int, context: dict[str, Any]) -> None:
        """long_prompt: words; max_tokens: of a long answer."""
        self._long, self._max_tokens, self._context = long_prompt, max_tokens, context
        self._random = random.Random(seed)

    @property
    def selects(self) -> bool:
        """Whether requests may bring a context budget."""
        return self._context["mode"] != "full"

    def references(self, count: int) -> list[Reference]:
        """Short and long prompts of all kinds, greedy and sampled with a seed."""
        lossy = self._context["mode"] in ("sparse", "bounded")
        made = []
        for number in range(count):
            kind, long = list(HEADS)[number % len(HEADS)], number // len(HEADS) % 2 == 1
            fields = {} if number // (2 * len(HEADS)) % 2 == 0 else SAMPLED
            name = f"{'sampled' if fields else 'greedy'} {'long' if long else 'short'}"
            prompt = self.prompt(self._random, kind, self._long if long else 40)
            made.append(Reference(name, self._body(prompt, self._max_tokens) | fields, not (long and lossy)))
        return made

    def ask(self, choose: random.Random, references: Sequence[Reference]) -> Ask:
        """A request of the mix: two thirds have a known answer; half are streamed."""
        extra: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        extra = extra if choose.random() < 0.5 else {}
        if choose.random() < 0.67:
            return self._known(choose, choose.choice(references), extra)
        return Ask(self._unknown(choose) | extra)

    def _known(self, choose: random.Random, reference: Reference, extra: dict[str, Any]) -> Ask:
        limit = choose.choice((8, self._max_tokens))
        plain = choose.random() < 0.1 if reference.settled else choose.random() < 0.7
        body = reference.body | {"max_tokens": limit} | extra | ({"speculative": False} if plain else {})
        return Ask(body, reference if plain or reference.settled else None)

    def _unknown(self, choose: random.Random) -> dict[str, Any]:
        """Sampled afresh, some with several samples, a grammar or a context budget of their own."""
        size = choose.choice((12, 40, self._long))
        prompt = self.prompt(choose, choose.choice(list(HEADS)), size)
        body = self._body(prompt, choose.choice((4, self._max_tokens)))
        body |= {"temperature": choose.choice((0.5, 1.0)), "n": choose.choice((1, 1, 2)), "top_p": 0.95}
        if choose.random() < 0.1:
            body["structured_outputs"] = {"regex": "[a-z]{3,12}( [a-z]{3,12}){2,5}"}
        if self.selects and choose.random() < 0.3:
            budget = self._context["budget"]
            other = (
                2 * budget if self._context["kv_path"] is None else budget // 2
            )  # buffers of slow layers hold no more
            body["context_budget"] = choose.choice((budget, other))
        return body

    def prompt(self, choose: random.Random, kind: str, size: int) -> str:
        """A text of some `size` words."""
        words = " ".join(choose.choice(WORDS) for _ in range(size))
        if kind == "edit":
            return f"Repeat this text exactly.\n{words}\nThe text again:\n{words[: len(words) // 2]}"
        return f"{HEADS[kind]} {words}"

    def _body(self, prompt: str, limit: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
