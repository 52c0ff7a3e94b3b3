"""The mutable life of one sample of a request, and the frozen plan of one step. Neither touches tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outrider.sampling.sampler import Sampler
from outrider.sampling.stopper import Stopper
from outrider.types import Logprob, Request, SamplingParams


class Status(Enum):
    """Where a sequence is: a waiting one holds no pages, a finished one holds nothing at all."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sample of a request. `computed` tokens have their KV committed; the others are known but not computed."""

    id: int
    request: Request
    index: int
    sampler: Sampler
    stopper: Stopper
    tokens: list[int]
    computed: int = 0
    status: Status = Status.WAITING
    cached_tokens: int = 0  # prompt tokens that the prefix cache gave
    preemptions: int = 0
    losses: int = 0  # times that its KV was lost
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """The generated tokens so far (a copy)."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be scored."""
        return self.params.prompt_logprobs is not None and self.computed < self.prompt_length


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: compute `rows` known tokens, and verify at most `limit` drafted ones."""

    sequence: Sequence
    rows: int
    limit: int = 0

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that the target says what follows."""
        return self.rows == self.sequence.remaining


@dataclass(frozen=True)
class Plan:
    """Who runs in one step, with which token and draft budgets."""

    works: tuple[Work, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.works)
