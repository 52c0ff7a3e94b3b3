"""What the Python API gives back: the names are those of vLLM, so that code written for it reads the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.types import Delta, Finish, Logprob, Reads, Traffic


@dataclass(frozen=True)
class Piece:
    """One step's news of one sample, as text. Concatenated, the pieces' texts are the sample's final text.

    `text` may lag behind `token_ids`: incomplete UTF-8 and possible beginnings of stop strings are held back.
    The first `accepted` of `token_ids` were proposed by `drafter`. `finish` is set on exactly one piece per sample.
    """

    request_id: str
    index: int
    text: str
    texts: tuple[str, ...] = ()  # what each of token_ids made visible; one more entry may end a sample
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    accepted: int = 0
    drafted: int = 0
    drafter: str = "none"
    finish: Finish | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    reads: Reads | None = None
    traffic: Traffic | None = None


@dataclass
class SpeculativeMetrics:
    """How speculation did for one sample. A draft is one verification that had drafted tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification."""
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens per verification; 1.0 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """Share of the drafts whose i-th token was accepted."""
        return [count / self.num_drafts for count in self.accepted_per_position]


@dataclass
class ContextMetrics:
    """What attention read for one request, over all samples. A step is one sample's part of a forward pass.

    In lossless mode it is the drafts that read sparsely; what verifies them reads everything.
    """

    mode: str = "full"
    budget: int | None = None  # entries per KV head; None: everything is read
    sparse_steps: int = 0
    full_steps: int = 0
    read_entries: int = 0  # committed entries read per KV head, over all steps
    known_entries: int = 0  # committed entries there were
    loaded_bytes: int = 0  # from the slow tier, for this request
    stored_bytes: int = 0
    exposed_wait_s: float = 0.0  # its steps waited so long for the slow tier
    _captured: list[float] = field(default_factory=list, repr=False)
    _overlap: list[float] = field(default_factory=list, repr=False)

    def add(self, reads: Reads | None, traffic: Traffic | None = None) -> None:
        """Count one step."""
        if traffic is not None:
            self.loaded_bytes += traffic.loaded_bytes
            self.stored_bytes += traffic.stored_bytes
            self.exposed_wait_s += traffic.exposed_s
        if reads is None:
            return
        self.budget = reads.budget
        self.sparse_steps += reads.entries < reads.length
        self.full_steps += reads.entries == reads.length
        self.read_entries += reads.entries
        self.known_entries += reads.length
        self._captured += [] if reads.captured is None else [reads.captured]
        self._overlap += [] if reads.overlap is None else [reads.overlap]

    @property
    def captured_mass(self) -> float | None:
        """Mean share of attention that the selections are believed to hold; None where the selector cannot tell."""
        return sum(self._captured) / len(self._captured) if self._captured else None

    @property
    def overlap(self) -> float | None:
        """Mean share of a selection that the step before had read too."""
        return sum(self._overlap) / len(self._overlap) if self._overlap else None

    def line(self) -> str:
        """A few words for people."""
        moved = []
        if self.loaded_bytes or self.stored_bytes:
            size, wait = (self.loaded_bytes + self.stored_bytes) / 1e6, 1e3 * self.exposed_wait_s
            moved = [f"{size:.1f} MB moved between tiers, {wait:.0f} ms waited"]
        if self.budget is None:
            return ", ".join([f"{self.mode} context", *moved])
        share = self.read_entries / self.known_entries if self.known_entries else 1.0
        parts = [f"{self.mode} context, budget {self.budget}: {share:.0%} read"]
        if self.captured_mass is not None:
            parts.append(f"about {self.captured_mass:.0%} of attention")
        if self.overlap is not None:
            parts.append(f"{self.overlap:.0%} kept from step to step")
        return ", ".join([*parts, *moved])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        named = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**named, "captured_mass": self.captured_mass, "overlap": self.overlap}


@dataclass
class RequestMetrics:
    """Times in seconds since the request was submitted, and what speculation did, over all samples."""

    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    speculative: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)
    context: ContextMetrics = field(default_factory=ContextMetrics)

    def add(self, delta: Delta, elapsed: float) -> None:
        """Count one delta."""
        if delta.tokens and self.first_token_s is None:
            self.first_token_s = elapsed
            self.cached_tokens = delta.cached_tokens
        if delta.finish is not None:
            self.finished_s = elapsed
        self.speculative.add(delta.drafted, delta.accepted)
        self.context.add(delta.reads, delta.traffic)


@dataclass
class CompletionOutput:
    """One sample: what it says and why it ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    accepted: list[bool] = field(default_factory=list)  # per token: whether a drafter had proposed it

    def add(self, piece: Piece) -> None:
        """Append one piece."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.accepted += [position < piece.accepted for position in range(len(piece.token_ids))]
        if self.logprobs is not None:
            self.logprobs += piece.logprobs
        if piece.finish is not None:
            self.finish_reason, self.stop_reason = piece.finish.reason, piece.finish.detail


@dataclass
class RequestOutput:
    """Everything about one prompt: its samples, metrics and, where asked for, the prompt's log-probabilities."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[Logprob | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record (for `outrider generate --json`)."""
        speculative = self.metrics.speculative
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "cached_tokens": self.metrics.cached_tokens,
            "outputs": [
                {
                    "index": o.index,
                    "text": o.text,
                    "token_ids": o.token_ids,
                    "finish_reason": o.finish_reason,
                    "stop_reason": o.stop_reason,
                }
                for o in self.outputs
            ],
            "ttft_ms": 1e3 * (self.metrics.first_token_s or 0),
            "total_ms": 1e3 * (self.metrics.finished_s or 0),
            "speculative": {
                "num_drafts": speculative.num_drafts,
                "num_draft_tokens": speculative.num_draft_tokens,
                "num_accepted_tokens": speculative.num_accepted_tokens,
                "acceptance_length": speculative.acceptance_length,
                "per_position": speculative.per_position,
            },
            "context": self.metrics.context.to_dict(),
        }
