"""Tokens become text: whole UTF-8 only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.api.outputs import Piece
from outrider.types import Delta, Finish, SamplingParams


class Pusher(Protocol):
    """An incremental detokenizer (models/load/detokenizer.py)."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """One sample's text. `push` gives what is safe to show; the concatenation is the final text."""

    def __init__(self, detokenizer: Pusher, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._held = ""  # decoded but not shown yet

    def push(self, delta: Delta) -> Piece:
        """The piece that a delta becomes."""
        text = self._detokenizer.push(delta.tokens)
        if delta.finish is not None:
            text += self._detokenizer.flush()
        return Piece(
            request_id=delta.request_id,
            index=delta.index,
            text=self._release(text, delta.finish),
            token_ids=delta.tokens,
            logprobs=delta.logprobs,
            accepted=delta.accepted,
            drafted=delta.drafted,
            drafter=delta.drafter,
            finish=delta.finish,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=delta.prompt_logprobs,
        )

    def _release(self, text: str, finish: Finish | None) -> str:
        """What can be shown now; at a stop string everything from it on is dropped (or kept up to its end)."""
        text = self._held + text
        if finish is not None:
            self._held = ""
            return self._cut(text, finish)
        keep = held_length(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _cut(self, text: str, finish: Finish) -> str:
        if finish.reason != "stop" or not isinstance(finish.detail, str):
            return text
        at = text.find(finish.detail)
        if at < 0:
            return text
        return text[: at + len(finish.detail)] if self._include else text[:at]


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string (all of it but the last character)."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
