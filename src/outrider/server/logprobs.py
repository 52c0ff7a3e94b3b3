"""Log-probabilities in the three shapes clients know: OpenAI chat, OpenAI completions, vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.backend import Tokenizer
from outrider.types import Logprob

LOWEST = -9999.0  # JSON has no minus infinity


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone as text; parts of characters show as U+FFFD."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprob], top: int) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content` of some tokens."""
    return [
        _chat_entry(tokenizer, entry.token, entry.logprob)
        | {"top_logprobs": [_chat_entry(tokenizer, token, value) for token, value in entry.top[:top]]}
        for entry in logprobs
    ]


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[Logprob | None], tokens: Sequence[int], top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """OpenAI's `logprobs` of a completion's tokens, and the text offset behind them; None where nothing came before."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    values = [None if entry is None else _finite(entry.logprob) for entry in logprobs]
    tops = [None if entry is None else _alternatives(tokenizer, entry, top) for entry in logprobs]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: per position the tokens that were looked at, None for the first."""
    return [None if entry is None else _by_id(tokenizer, entry) for entry in logprobs]


def _by_id(tokenizer: Tokenizer, entry: Logprob) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)]
    ranked = [item for item in ranked if item[0] != entry.token]
    ranked.insert(0, (entry.token, entry.logprob, entry.rank))
    return {
        str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(tokenizer, token)}
        for token, value, rank in ranked
    }


def _alternatives(tokenizer: Tokenizer, entry: Logprob, top: int) -> dict[str, float]:
    pairs = [*entry.top[:top], (entry.token, entry.logprob)]
    return {token_text(tokenizer, token): _finite(value) for token, value in pairs}


def _chat_entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def _finite(value: float) -> float:
    return float(value) if value > LOWEST else LOWEST
