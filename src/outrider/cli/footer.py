"""The line behind an answer: how fast it was, and what speculation gave."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from outrider.api.outputs import ContextMetrics, Piece, SpeculativeMetrics


class Record:
    """Counts the pieces of one answer."""

    def __init__(self, mode: str = "full") -> None:
        """mode: of the context, as configured."""
        self.speculative = SpeculativeMetrics()
        self.context = ContextMetrics(mode)
        self.tokens = 0
        self.cached_tokens = 0
        self.finish: str | None = None
        self._started = perf_counter()
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._started

    def add(self, piece: Piece) -> None:
        """Count one piece."""
        self._last = perf_counter()
        if self._first is None and piece.token_ids:
            self._first, self._first_tokens = self._last, len(piece.token_ids)
            self.cached_tokens = piece.cached_tokens
        self.tokens += len(piece.token_ids)
        self.speculative.add(piece.drafted, piece.accepted)
        self.context.add(piece.reads, piece.traffic)
        if piece.finish is not None:
            self.finish = piece.finish.reason

    @property
    def tokens_per_second(self) -> float:
        """Speed behind the first token; 0 where there was only one."""
        if self._first is None or self._last <= self._first:
            return 0.0
        return (self.tokens - self._first_tokens) / (self._last - self._first)

    @property
    def first_token_ms(self) -> float:
        """Milliseconds to the first token."""
        return 1e3 * ((self._first or self._last) - self._started)

    def line(self) -> str:
        """One line for people."""
        parts = [
            f"{self.tokens} tokens",
            f"{self.tokens_per_second:.1f} tokens/s",
            f"first {self.first_token_ms:.0f} ms",
        ]
        if self.speculative.num_drafts:
            share = self.speculative.num_accepted_tokens / max(1, self.tokens)
            parts += [f"acceptance length {self.speculative.acceptance_length:.2f}", f"{share:.0%} drafted"]
        parts.append(self.context.line())
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens} prompt tokens reused")
        if self.finish == "length":
            parts.append("cut at max tokens")
        return " · ".join(parts)


@contextmanager
def footer(mode: str = "full") -> Iterator[Record]:
    """Give a record to fill; its line goes to stderr afterwards."""
    record = Record(mode)
    yield record
    print(f"[{record.line()}]", file=sys.stderr)
