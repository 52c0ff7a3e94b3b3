"""Running `judge` on a scripted target: whole texts with and without drafts, and every branch that chance could take.

tokens, finish = plain_text(script, prompt, sampler, stopper)           # one token at a time, without judge
spoken = speculate(script, prompt, sampler, stopper, guess)             # the same through drafts
law(lambda dice: dice.choose([.5, .5]))                                 # {0: .5, 1: .5}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.sampling import Sampler, Stopper
from outrider.types import Draft, Finish, Float32, Float64, SamplingParams, Verdict
from outrider.verify import Rows, judge
from scripted import Script

#: (prompt + output so far) -> a draft.
Guess = Callable[[list[int]], Draft]


def spell(tokens: Sequence[int]) -> str:
    """Token i as the i-th lower-case letter."""
    return "".join(chr(ord("a") + token) for token in tokens)


def row(script: Script, prefix: Sequence[int], vocab_size: int) -> Float32:
    """The target's logits behind a prefix."""
    value = script(tuple(prefix))
    if isinstance(value, np.ndarray):
        return value
    logits = np.zeros(vocab_size, np.float32)
    logits[value] = 10.0
    return logits


def rows(script: Script, known: Sequence[int], draft: Draft, vocab_size: int) -> Rows:
    """What a forward pass over a draft gives."""
    paths = [[], *(draft.path(node) for node in range(len(draft)))]
    prefixes = [[*known, *(draft.tokens[node] for node in path)] for path in paths]
    logits = np.stack([row(script, prefix, vocab_size) for prefix in prefixes])
    return Rows(logits.argmax(axis=1), logits)


@dataclass
class Spoken:
    """A text and the verdicts that gave it."""

    tokens: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def finish(self) -> Finish | None:
        return self.verdicts[-1].finish

    @property
    def drafted(self) -> int:
        return sum(verdict.drafted for verdict in self.verdicts)

    @property
    def accepted(self) -> int:
        return sum(len(verdict.accepted) for verdict in self.verdicts)

    @property
    def corrected(self) -> int:
        """Drafts of which something was tried and turned down."""
        return sum(len(v.tokens) > len(v.accepted) < v.drafted for v in self.verdicts)


def speculate(
    script: Script, prompt: Sequence[int], sampler: Sampler, stopper: Stopper, guess: Guess, vocab_size: int = 50
) -> Spoken:
    """Generate until a stop, through drafts."""
    spoken = Spoken()
    while True:
        known = [*prompt, *spoken.tokens]
        draft = guess(known)
        verdict = judge(draft, rows(script, known, draft, vocab_size), sampler, stopper, list(spoken.tokens))
        spoken.verdicts.append(verdict)
        spoken.tokens += verdict.tokens
        if verdict.finish:
            return spoken


def plain_text(
    script: Script, prompt: Sequence[int], sampler: Sampler, stopper: Stopper, vocab_size: int = 50
) -> tuple[list[int], Finish]:
    """The same text one token at a time, without `judge`."""
    output: list[int] = []
    while True:
        output.append(sampler.pick(row(script, [*prompt, *output], vocab_size), list(output)))
        if finish := stopper.check(output):
            return output, finish


def sampler_for(params: SamplingParams, prompt: Sequence[int] = (), vocab_size: int = 50, **options: object) -> Sampler:
    """A sampler of a small model whose end token is the last id."""
    given = {"eos_token_ids": (vocab_size - 1,), "seed": 7, **options}
    return Sampler(params, prompt, vocab_size, **given)  # type: ignore[arg-type]


def stopper_for(params: SamplingParams, vocab_size: int = 50, room: int = 10_000) -> Stopper:
    """The stopper that goes with `sampler_for`."""
    return Stopper(params, (vocab_size - 1,), room, spell)


# --- enumeration -----------------------------------------------------------------------------------------------------


class Fork(Exception):
    """Chance was asked something that this branch has no answer to yet."""

    def __init__(self, options: dict[int, float]) -> None:
        self.options = options


class Dice:
    """Chance along one branch: gives the answers it was given, then forks."""

    def __init__(self, answers: Sequence[int] = ()) -> None:
        self._answers = list(answers)

    def choose(self, p: Sequence[float] | Float64) -> int:
        if not self._answers:
            raise Fork({token: float(p[token]) for token in range(len(p)) if p[token] > 0})
        return self._answers.pop(0)

    def flip(self, probability: float) -> bool:
        return bool(self.choose([1 - probability, probability]))


def law(play: Callable[[Dice], Hashable]) -> dict[Hashable, float]:
    """The exact distribution of what `play` returns, over everything its dice could say."""
    found: dict[Hashable, float] = defaultdict(float)
    branches: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while branches:
        answers, weight = branches.pop()
        try:
            found[play(Dice(answers))] += weight
        except Fork as fork:
            branches += [((*answers, answer), weight * p) for answer, p in fork.options.items()]
    return dict(found)


class DicedSampler(Sampler):
    """A sampler whose randomness is the dice's; its law is the real one."""

    dice: Dice

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        return self.dice.choose(self.distribution(logits, output))

    def redraw(self, p: Float64, position: int) -> int:
        return self.dice.choose(p)

    def flip(self, probability: float, position: int, attempt: int) -> bool:
        return self.dice.flip(probability)
