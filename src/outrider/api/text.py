"""Tokens become text: whole UTF-8 only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.api.outputs import Piece
from outrider.types import Delta, Finish, SamplingParams


class Pusher(Protocol):
    """An incremental detokenizer (models/load/detokenizer.py)."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make visible; bytes of an unfinished character are held back."""
        ...

    def flush(self) -> str:
        """What was held back, once the sample has ended."""
        ...


class TextStream:
    """One sample's text. `push` gives what is safe to show; the concatenation is the final text."""

    def __init__(self, detokenizer: Pusher, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._early = params.min_tokens - 1  # tokens that complete no stop string, as in sampling/stopper.py
        self._held = ""  # decoded but not shown yet
        self._cleared = 0  # leading characters of it that came with those tokens

    def push(self, delta: Delta) -> Piece:
        """The piece that a delta becomes."""
        texts = [self._show([token]) for token in delta.tokens]
        if delta.finish is not None:
            texts[-1:] = ["".join(texts[-1:]) + self._cut(self._held + self._detokenizer.flush(), delta.finish)]
            self._held = ""
        return Piece(
            request_id=delta.request_id,
            index=delta.index,
            text="".join(texts),
            texts=tuple(texts),
            token_ids=delta.tokens,
            logprobs=delta.logprobs,
            accepted=delta.accepted,
            drafted=delta.drafted,
            drafter=delta.drafter,
            finish=delta.finish,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=delta.prompt_logprobs,
            reads=delta.reads,
            traffic=delta.traffic,
        )

    def _show(self, tokens: Sequence[int]) -> str:
        """What can be shown now: all but an end that is, or may become, a stop string."""
        text = self._held + self._detokenizer.push(tokens)
        if self._early > 0:
            self._early -= 1
            self._cleared = len(text)
        shown = len(text) - held_length(text, self._stops, self._cleared)
        self._held, self._cleared = text[shown:], max(0, self._cleared - shown)
        return text[:shown]

    def _cut(self, text: str, finish: Finish) -> str:
        """The text up to the stop string that ended it, or up to its end where that is wanted."""
        if finish.reason != "stop" or not isinstance(finish.detail, str):
            return text
        at = find_stop(text, finish.detail, self._cleared)
        if at < 0:
            return text
        return text[: at + len(finish.detail)] if self._include else text[:at]


def find_stop(text: str, stop: str, cleared: int) -> int:
    """Where a stop string begins that ends behind the first `cleared` characters; -1 where there is none."""
    return text.find(stop, max(0, cleared - len(stop) + 1))


def held_length(text: str, stops: Sequence[str], cleared: int = 0) -> int:
    """Characters to hold back: from the first whole stop string on, else the longest end that may become one."""
    whole = [at for at in (find_stop(text, stop, cleared) for stop in stops) if at >= 0]
    if whole:
        return len(text) - min(whole)
    longest = max(map(len, stops), default=1) - 1
    ends = (n for n in range(min(longest, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return next(ends, 0)
