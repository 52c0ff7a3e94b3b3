"""Which characters of a stream were drafted, and by whom: what the web page tints.

Text may lag behind its tokens, so a queue of (bytes, drafter) per token is consumed as text comes out. The lengths are
those of the tokens' own bytes; where a model's text is not exactly that, the tint may be a character off, the text not.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from outrider.server.backend import Piece, Tokenizer


class Spans:
    """The origin of one sample's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._queue: deque[tuple[int, str | None]] = deque()

    def cut(self, piece: Piece) -> list[dict[str, Any]]:
        """The piece's text as runs [{"text", "drafter"}]; drafter None: the target's own."""
        for position, token in enumerate(piece.token_ids):
            drafter = piece.drafter if position < piece.accepted else None
            self._queue.append((len(self._tokenizer.token_bytes(token)), drafter))
        runs: list[dict[str, Any]] = []
        for character in piece.text:
            drafter = self._take(len(character.encode("utf-8", "replace")))
            if runs and runs[-1]["drafter"] == drafter:
                runs[-1]["text"] += character
            else:
                runs.append({"text": character, "drafter": drafter})
        return runs

    def _take(self, size: int) -> str | None:
        """Consume a character's bytes; its origin is that of its last byte."""
        drafter = None
        while size > 0 and self._queue:
            length, drafter = self._queue.popleft()
            if length > size:
                self._queue.appendleft((length - size, drafter))
            size -= length
        return drafter
