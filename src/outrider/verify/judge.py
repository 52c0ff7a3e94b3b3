"""What the target makes of a draft: the only acceptance code, for chains and trees, greedy and sampled.

    verdict = judge(draft, rows, sampler, stopper, output)

Two rules, both of which leave the law of the output untouched.

*Matching*: the target chooses its own token with its own noise; the draft is accepted where it proposed that token.
This is the point-mass case of speculative sampling (accept x with probability p(x), else sample from p without x), and
as the choice never looks at the draft, neither votes nor depths that depend on drafted values can bend it: the seeded
output is the same with any draft and with none.

*Rejection*, for drafts that carry the q each token was sampled from: accept x with probability min(1, p(x) / q(x)),
else go on with the residual max(p - q, 0), normalised (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding", section 2.3 and appendix A.1). Siblings of a tree are tried in order, each against the residual
that the one before left (Miao et al. 2024, "SpecInfer", algorithm 2). It is exact only where every token really was
sampled from its q: tokens that were picked by looking at them (votes) must come without probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.sampling.stopper import Stopper
from outrider.types import Draft, Finish, Float32, Float64, Logprob, SamplingParams, Verdict
from outrider.verify.logprobs import logprob

#: A token of the target and the draft node that proposed it, if one did.
Ruling = tuple[int, "int | None"]


@dataclass(frozen=True)
class Rows:
    """What the target computed for one draft: row 0 follows the last known token, row i + 1 follows draft node i."""

    best: NDArray[np.int64]  # [n + 1] greedy token of every row
    logits: Float32 | None = None  # [n + 1, V] raw; None is enough for samplers without `needs_logits`


class Target(Protocol):
    """The target's law and its randomness, as `sampling.Sampler` gives them. Randomness enters nowhere else."""

    params: SamplingParams
    vocab_size: int
    greedy: bool

    @property
    def needs_logits(self) -> bool:
        """Whether the best token of a row is not enough."""
        ...

    def distribution(self, logits: Float32, output: Sequence[int]) -> Float64:
        """p [V] of the token after `output`, given raw logits [V]; sums to 1."""
        ...

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        """The token that plain decoding emits after `output`, given raw logits [V]."""
        ...

    def redraw(self, p: Float64, position: int) -> int:
        """A draw from p [V] at a position, with noise that no drafter shares."""
        ...

    def flip(self, probability: float, position: int, attempt: int) -> bool:
        """True with the given probability; independent for every (position, attempt)."""
        ...


def judge(draft: Draft, rows: Rows, sampler: Target, stopper: Stopper, output: Sequence[int]) -> Verdict:
    """Follow the draft from its root for as long as the target agrees, and add one token of the target's own.

    `output`: the tokens generated before this step. A token that ends the text is the verdict's last, drafted or not.
    """
    rule = _rule_for(draft, sampler)
    known, accepted, node = list(output), list[int](), -1
    logprobs, finish = list[Logprob](), None
    while finish is None:
        token, child = rule(draft, rows, sampler, node, known)
        known.append(token)
        logprobs += _logprobs(rows, sampler, node, token)
        finish = stopper.check(known)
        if child is None:
            break
        accepted.append(child)
        node = child
    return _verdict(draft, known[len(output) :], accepted, finish, logprobs)


def residual(p: Float64, q: Float64) -> Float64:
    """What is left of p [V] once a proposal from q [V] was rejected: max(p - q, 0), normalised."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    # p == q rejects with probability 0; only rounding gets here.
    return left / total if total > 0 else p


def _rule_for(draft: Draft, sampler: Target) -> Callable[..., Ruling]:
    """Where p is a point mass both rules agree, and matching is the cheaper one."""
    return _match if draft.probs is None or sampler.greedy else _reject


def _match(draft: Draft, rows: Rows, sampler: Target, node: int, known: Sequence[int]) -> Ruling:
    """The target's own choice, and the child that proposed it."""
    token = _choice(rows, sampler, node, known)
    return token, next((child for child in draft.children(node) if draft.tokens[child] == token), None)


def _choice(rows: Rows, sampler: Target, node: int, known: Sequence[int]) -> int:
    best = int(rows.best[node + 1])
    if sampler.needs_logits or best >= sampler.vocab_size:
        return sampler.pick(_row(rows, node), known)
    return best


def _reject(draft: Draft, rows: Rows, sampler: Target, node: int, known: Sequence[int]) -> Ruling:
    """Recursive rejection over the children of a node."""
    p = sampler.distribution(_row(rows, node), known)
    for attempt, child in enumerate(draft.children(node)):
        token, q = draft.tokens[child], _proposal(draft, child, len(p))
        if token < len(p) and sampler.flip(min(1.0, p[token] / q[token]), len(known), attempt):
            return token, child
        p = residual(p, q)
    return sampler.redraw(p, len(known)), None


def _proposal(draft: Draft, node: int, size: int) -> Float64:
    """q [V] of a node, cut or padded to the target's vocabulary; a token that q excludes is judged as a point mass."""
    assert draft.probs is not None
    token, given = draft.tokens[node], draft.probs[node]
    q = np.zeros(size)
    if token < len(given) and given[token] > 0:
        q[: len(given)] = given[:size]
    elif token < size:
        q[token] = 1.0
    return q


def _row(rows: Rows, node: int) -> Float32:
    assert rows.logits is not None, "this sampler needs logits"
    return rows.logits[node + 1]


def _logprobs(rows: Rows, sampler: Target, node: int, token: int) -> list[Logprob]:
    """The log-probability of an emitted token, where the request asks for it."""
    top = sampler.params.logprobs
    return [] if top is None else [logprob(_row(rows, node), token, top, sampler.vocab_size)]


def _verdict(
    draft: Draft, tokens: Sequence[int], accepted: Sequence[int], finish: Finish | None, logprobs: Sequence[Logprob]
) -> Verdict:
    return Verdict(tuple(tokens), tuple(accepted), len(draft), draft.drafter, finish, tuple(logprobs))
