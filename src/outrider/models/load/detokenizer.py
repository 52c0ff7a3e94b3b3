"""Tokens to text, a few at a time: one Detokenizer per sample.

Pieces joined are exactly the decoding of all tokens, however they are cut; a character whose bytes are not complete
is held back until they are, or until flush().
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Spelling(Protocol):
    """What a detokenizer needs of a tokenizer."""

    strips_first_space: bool

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """The text of one growing sequence of tokens. O(1) per token."""

    def __init__(self, tokenizer: Spelling, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; empty where they end within a character."""
        data = b"".join(self._tokenizer.token_bytes(t) for t in tokens if not self._skipped(t))
        return self._decoder.decode(self._stripped(data))

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)

    def _skipped(self, token: int) -> bool:
        return self._skip_special and self._tokenizer.is_special(token)

    def _stripped(self, data: bytes) -> bytes:
        """Without the space that some tokenizers put before the first word."""
        if not self._strip or not data:
            return data
        self._strip = False
        return data.removeprefix(b" ")
