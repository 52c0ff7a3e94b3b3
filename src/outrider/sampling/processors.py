"""What changes a row of logits before sampling: masks, bias and penalties, in vLLM's order and with its semantics.

A processor is a function of (logits, output tokens) and of what it was built with; what it remembers between calls is
only a shortcut. That makes it right at every position of a draft, after a rejection and after preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UnsupportedError
from outrider.sampling.prefix import shared_length
from outrider.types import Float32, SamplingParams

Ids = NDArray[np.int64]


class Processor(Protocol):
    """One change to the logits of the next token."""

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        """Change logits [V] in place, given the tokens generated so far; -inf forbids a token."""
        ...


class Forbid:
    """Banned tokens, or the complement of the allowed ones."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        logits[self._ids] = -np.inf


class MinTokens:
    """No end token before `minimum` tokens, unless nothing else is allowed (a grammar that has ended)."""

    def __init__(self, minimum: int, ends: Ids) -> None:
        self._minimum, self._ends = minimum, ends

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        if len(output) >= self._minimum:
            return
        kept = logits[self._ends].copy()
        logits[self._ends] = -np.inf
        if not (logits > -np.inf).any():
            logits[self._ends] = kept


class Bias:
    """logit_bias: added to the named tokens."""

    def __init__(self, ids: Ids, values: Float32) -> None:
        self._ids, self._values = ids, values

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        logits[self._ids] += self._values


class RepetitionPenalty:
    """Tokens of the prompt or output: positive logits are divided, negative ones multiplied (CTRL, section 4.1)."""

    def __init__(self, penalty: float, prompt: Ids, counts: OutputCounts) -> None:
        self._penalty, self._counts = np.float32(penalty), counts
        self._prompt = np.unique(prompt)

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        self._counts.move_to(output)
        seen = np.union1d(self._prompt, self._counts.ids)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / self._penalty, values * self._penalty)


class CountPenalty:
    """OpenAI's frequency penalty (per use in the output) and presence penalty (once used)."""

    def __init__(self, frequency: float, presence: float, counts: OutputCounts) -> None:
        self._frequency, self._presence = np.float32(frequency), np.float32(presence)
        self._counts = counts

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        self._counts.move_to(output)
        logits[self._counts.ids] -= self._frequency * self._counts.uses + self._presence


class OutputCounts:
    """How often each token occurs in an output; moving to a similar output costs only the difference."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._uses: dict[int, int] = {}
        self._arrays: tuple[Ids, Float32] | None = None

    def move_to(self, output: Sequence[int]) -> None:
        """Count `output`."""
        shared = shared_length(self._known, output)
        if shared == len(self._known) == len(output):
            return
        for token in self._known[shared:]:
            self._change(token, -1)
        for token in output[shared:]:
            self._change(token, 1)
        self._known[shared:] = output[shared:]
        self._arrays = None

    @property
    def ids(self) -> Ids:
        """The distinct tokens of the output."""
        return self._both()[0]

    @property
    def uses(self) -> Float32:
        """The number of times each of `ids` occurs."""
        return self._both()[1]

    def _change(self, token: int, by: int) -> None:
        uses = self._uses.get(token, 0) + by
        if uses:
            self._uses[token] = uses
        else:
            del self._uses[token]

    def _both(self) -> tuple[Ids, Float32]:
        if self._arrays is None:
            ids = np.fromiter(self._uses.keys(), np.int64, len(self._uses))
            self._arrays = ids, np.fromiter(self._uses.values(), np.float32, len(self._uses))
        return self._arrays


def build_processors(
    params: SamplingParams, prompt: Sequence[int], vocab_size: int, eos_token_ids: Iterable[int]
) -> tuple[Processor, ...]:
    """The processors that a request's parameters ask for, in vLLM's order; UnsupportedError names a bad field."""
    built: list[Processor] = []
    forbidden = _forbidden(params, vocab_size)
    if len(forbidden):
        built.append(Forbid(forbidden))
    real_ends = (token for token in eos_token_ids if token < vocab_size)
    ends = np.union1d(_ids("stop_token_ids", params.stop_token_ids or (), vocab_size), np.fromiter(real_ends, np.int64))
    if params.min_tokens and len(ends):
        built.append(MinTokens(params.min_tokens, ends))
    if params.logit_bias:
        built.append(_bias(params.logit_bias, vocab_size))
    return (*built, *_penalties(params, prompt))


def _forbidden(params: SamplingParams, vocab_size: int) -> Ids:
    """Ids that may never be chosen, ascending. One pass over the vocabulary: every request waits for it."""
    forbidden = np.full(vocab_size, params.allowed_token_ids is not None)
    forbidden[_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)] = False
    forbidden[_ids("banned_token_ids", params.banned_token_ids or (), vocab_size)] = True
    if forbidden.all():
        raise UnsupportedError(
            "allowed_token_ids and banned_token_ids leave no token; allow at least one", field="allowed_token_ids"
        )
    return np.flatnonzero(forbidden)


def _bias(bias: object, vocab_size: int) -> Bias:
    """logit_bias with values held to -100 .. 100, as vLLM does."""
    try:
        pairs = {int(token): float(value) for token, value in bias.items()}  # type: ignore[attr-defined]
    except OverflowError:
        raise UnsupportedError(
            "logit_bias holds a number beyond all floats; use -100 to 100", field="logit_bias"
        ) from None
    if any(math.isnan(value) for value in pairs.values()):
        raise UnsupportedError("logit_bias holds NaN; use numbers from -100 to 100", field="logit_bias")
    values = np.clip(np.fromiter(pairs.values(), np.float32, len(pairs)), -100, 100)
    ids = _ids("logit_bias", pairs, vocab_size)
    return Bias(ids, values[np.argsort(np.fromiter(pairs.keys(), np.int64, len(pairs)))])


def _penalties(params: SamplingParams, prompt: Sequence[int]) -> list[Processor]:
    """Repetition, then frequency and presence."""
    counts, built = OutputCounts(), list[Processor]()
    if params.repetition_penalty != 1.0:
        built.append(RepetitionPenalty(params.repetition_penalty, np.asarray(prompt, np.int64), counts))
    if params.frequency_penalty or params.presence_penalty:
        built.append(CountPenalty(params.frequency_penalty, params.presence_penalty, counts))
    return built


def _ids(field: str, tokens: Iterable[int], vocab_size: int) -> Ids:
    """Distinct token ids in ascending order; one outside the vocabulary is refused."""
    try:
        ids = np.unique(np.fromiter(tokens, np.int64))
    except OverflowError:
        raise UnsupportedError(
            f"{field} holds a huge token id; use ids from 0 to {vocab_size - 1}", field=field
        ) from None
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UnsupportedError(f"{field} holds token id {outside[0]}; use ids from 0 to {vocab_size - 1}", field=field)
    return ids
