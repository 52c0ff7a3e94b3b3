"""What one request used and how long it took: counted from the pieces that were delivered, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from outrider.server.backend import Piece
from outrider.server.metrics import Metrics


class Usage:
    """Tokens of one request over all prompts and samples."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = self.accepted = self.drafted = 0
        self._cached = [0] * len(prompts)

    def add(self, prompt: int, piece: Piece) -> None:
        """Count one piece of the answer to prompt number `prompt`."""
        self.completion_tokens += len(piece.token_ids)
        self.accepted += piece.accepted
        self.drafted += piece.drafted
        self._cached[prompt] = max(self._cached[prompt], piece.cached_tokens)

    @property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(self._cached)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": max(0, self.drafted - self.accepted),
            },
        }


class Meter:
    """One request's times and usage, for metrics and the log's `record`."""

    def __init__(self, metrics: Metrics, record: dict[str, Any], usage: Usage) -> None:
        self._metrics, self._record, self.usage = metrics, record, usage
        self._start = record.get("start", perf_counter())
        self._last: dict[int, float] = {}

    def add(self, prompt: int, choice: int, piece: Piece) -> None:
        """Count one piece of choice number `choice`."""
        now = perf_counter()
        self.usage.add(prompt, piece)
        if piece.token_ids:
            self._times(now, choice, len(piece.token_ids))
        if piece.finish is not None:
            self._metrics.finished.labels(piece.finish.reason).inc()

    def finish(self) -> None:
        """The request is over, whether or not it was whole."""
        usage = self.usage
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generation_tokens.inc(usage.completion_tokens)
        self._metrics.prompt.observe(usage.prompt_tokens)
        self._metrics.generated.observe(usage.completion_tokens)
        self._metrics.whole.observe(perf_counter() - self._start)
        self._record |= {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached,
            "drafted_tokens": usage.drafted,
            "accepted_tokens": usage.accepted,
        }

    def _times(self, now: float, choice: int, tokens: int) -> None:
        if not self._last:
            self._metrics.first.observe(now - self._start)
            self._record["ttft_ms"] = round(1e3 * (now - self._start), 2)
        if choice in self._last:
            self._metrics.each.observe((now - self._last[choice]) / tokens, tokens)
        self._last[choice] = now
