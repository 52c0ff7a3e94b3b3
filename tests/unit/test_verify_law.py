"""The law of what `judge` emits, by exact enumeration of everything that chance could do."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from judging import Dice, DicedSampler, law, row, rows, stopper_for
from outrider.types import Draft, Float64, SamplingParams
from outrider.verify import judge
from scripted import random_logits

V = 3
PROMPT = [1]
TARGET = random_logits(V, seed=1, spread=1.0)
DRAFTER = random_logits(V, seed=2, spread=1.0)
OTHER = random_logits(V, seed=3, spread=1.0)
PARAMS = {
    "plain": SamplingParams(max_tokens=3, ignore_eos=True),
    "cut": SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8, top_k=2, top_p=0.95),
    "penalties": SamplingParams(
        max_tokens=3, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-1.0, min_p=0.05
    ),
    "greedy": SamplingParams(max_tokens=3, ignore_eos=True, temperature=0),
}

#: (dice, prefix) -> a draft.
Guess = Callable[[Dice, list[int]], Draft]


def q_of(script: Callable, prefix: list[int], size: int = V) -> Float64:
    weights = np.exp(np.asarray(script(tuple(prefix)), np.float64)[:size])
    return weights / weights.sum()


def chain(dice: Dice, prefix: list[int], depth: int = 2, script: Callable = DRAFTER) -> Draft:
    """A chain, each token sampled from the q it carries."""
    tokens: list[int] = []
    probs = []
    for _ in range(depth):
        probs.append(q_of(script, [*prefix, *tokens]))
        tokens.append(dice.choose(probs[-1]))
    return Draft(tuple(tokens), probs=np.array(probs))


def points(dice: Dice, prefix: list[int]) -> Draft:
    """Sampled tokens without their q."""
    return Draft(chain(dice, prefix).tokens)


def siblings(dice: Dice, prefix: list[int]) -> Draft:
    """A tree: two siblings drawn independently from one q, a child under each."""
    q = q_of(DRAFTER, prefix)
    first, second = dice.choose(q), dice.choose(q)
    below = [q_of(DRAFTER, [*prefix, token]) for token in (first, second)]
    tokens = (first, second, *(dice.choose(q) for q in below))
    return Draft(tokens, parents=(-1, -1, 0, 1), probs=np.array([q, q, *below]))


def without_replacement(dice: Dice, prefix: list[int]) -> Draft:
    """Two siblings, the second drawn from what the first left."""
    q, tokens, probs = q_of(DRAFTER, prefix), [], []
    for _ in range(2):
        probs.append(q)
        tokens.append(dice.choose(q))
        q = np.where(np.arange(V) == tokens[-1], 0.0, q)
        q = q / q.sum()
    return Draft(tuple(tokens), parents=(-1, -1), probs=np.array(probs))


def mixed(dice: Dice, prefix: list[int]) -> Draft:
    """Siblings of two drafters: one that always says 2 (a q of one token), one that samples."""
    q = q_of(DRAFTER, prefix)
    return Draft((2, dice.choose(q)), parents=(-1, -1), probs=np.array([np.eye(V)[2], q]))


def voted(dice: Dice, prefix: list[int]) -> Draft:
    """Two drafters sample; the kept token depends on which was sampled. A point mass, as it must be."""
    mine, theirs = q_of(DRAFTER, prefix), q_of(OTHER, prefix)
    a, b = dice.choose(mine), dice.choose(theirs)
    return Draft((a if mine[a] > theirs[b] else b, a))


def depth_by_value(dice: Dice, prefix: list[int]) -> Draft:
    """The depth depends on the sampled tokens."""
    tokens = chain(dice, prefix).tokens
    return Draft(tokens[: 2 - tokens[0] % 3])


def shared_tree(dice: Dice, prefix: list[int]) -> Draft:
    """A merged tree of point masses: two sampled chains, one of them from another drafter."""
    a, b = chain(dice, prefix).tokens, chain(dice, prefix, script=OTHER).tokens
    return Draft((a[0], b[0], a[1], b[1]), parents=(-1, -1, 0, 1))


def foreign(size: int) -> Guess:
    """A chain of a drafter whose vocabulary is padded otherwise than the target's."""
    return lambda dice, prefix: chain(dice, prefix, script=random_logits(size, seed=4, spread=1.0))


def dishonest(dice: Dice, prefix: list[int]) -> Draft:
    """Tokens that the recorded q excludes: they count as point masses."""
    return Draft((1, 2), probs=np.array([[0.5, 0, 0.5], [1.0, 0, 0]]))


GUESSES: dict[str, Guess] = {
    "none": lambda dice, prefix: Draft(),
    "chain": chain,
    "points": points,
    "siblings": siblings,
    "without replacement": without_replacement,
    "mixed": mixed,
    "voted": voted,
    "depth by value": depth_by_value,
    "shared tree": shared_tree,
    "larger vocabulary": lambda dice, prefix: foreign(V + 1)(dice, [*prefix]),
    "smaller vocabulary": lambda dice, prefix: _narrow(dice, prefix),
    "dishonest": dishonest,
}


def _narrow(dice: Dice, prefix: list[int]) -> Draft:
    q = q_of(DRAFTER, prefix, V - 1)
    return Draft((dice.choose(q),), probs=q[None])


def step_law(params: SamplingParams, guess: Guess, counts: dict[str, int]) -> dict:
    """The law of the tokens that one step emits."""

    def play(dice: Dice) -> tuple[int, ...]:
        sampler = DicedSampler(params, PROMPT, V, (V - 1,), seed=0)
        sampler.dice = dice
        draft = guess(dice, PROMPT)
        verdict = judge(draft, rows(TARGET, PROMPT, draft, V), sampler, stopper_for(params, V), [])
        counts["accepted"] += len(verdict.accepted)
        counts["rejected"] += len(verdict.accepted) < len(verdict.tokens) and len(verdict.accepted) < len(draft)
        return verdict.tokens

    return law(play)


def continued(emitted: dict, params: SamplingParams) -> dict:
    """The law of three tokens that begin as `emitted` says and go on as the target does."""
    sampler = DicedSampler(params, PROMPT, V, (V - 1,), seed=0)
    found = {}
    for text in product(range(V), repeat=3):
        p = [sampler.distribution(row(TARGET, [*PROMPT, *text[:i]], V), list(text[:i]))[text[i]] for i in range(3)]
        found[text] = sum(emitted.get(text[:done], 0.0) * math.prod(p[done:]) for done in range(4))
    return found


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
def test_every_draft_leaves_the_law_of_the_text(guess: Guess, params: SamplingParams) -> None:
    counts = {"accepted": 0, "rejected": 0}
    found, wanted = continued(step_law(params, guess, counts), params), continued({(): 1.0}, params)
    assert math.isclose(sum(wanted.values()), 1.0, abs_tol=1e-12)
    assert max(abs(found[text] - wanted[text]) for text in wanted) < 1e-12
    assert all(found[text] == 0 for text in wanted if wanted[text] == 0)
    if guess is not GUESSES["none"] and not (params.temperature == 0 or guess is dishonest):
        assert min(counts.values()) > 0


# --- a vote that looks at values, by hand ----------------------------------------------------------------------------

P = np.array([0.5, 0.3, 0.2])
Q = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])


def voted_law(with_probs: bool) -> list[float]:
    """Keep whichever sampled token has the larger probability under its own drafter; judge one token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    logits = np.log(P).astype(np.float32)

    def play(dice: Dice) -> int:
        sampler = DicedSampler(params, (), 3, (2,), seed=0)
        sampler.dice = dice
        sampled = [dice.choose(q) for q in Q]
        keeper = int(Q[1][sampled[1]] > Q[0][sampled[0]])
        draft = Draft((sampled[keeper],), probs=Q[keeper][None] if with_probs else None)
        return judge(draft, rows(lambda _: logits, [], draft, 3), sampler, stopper_for(params, 3), []).tokens[0]

    found = law(play)
    return [found[token] for token in range(3)]


def test_a_vote_by_value_judged_as_a_point_mass_is_exact() -> None:
    assert voted_law(with_probs=False) == pytest.approx(P, abs=1e-7)


def test_a_vote_by_value_divided_by_the_keepers_q_is_wrong() -> None:
    """Why voted drafts carry no probabilities."""
    assert [round(p, 2) for p in voted_law(with_probs=True)] == [0.62, 0.21, 0.17]
