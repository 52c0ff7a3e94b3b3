"""What the server needs of the engine, as protocols: the engine's service satisfies them, and so does a test's stub."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from outrider.types import Finish, Logprob, SamplingParams


class Piece(Protocol):
    """News of one sample: text that is safe to show (whole characters, no possible stop string) and its tokens.

    `text` may lag behind `token_ids`; the last piece of a sample, the one with `finish`, brings what was held back.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def index(self) -> int:
        """Which of the n samples."""
        ...

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Logprob]: ...
    @property
    def accepted(self) -> int:
        """The first `accepted` of `token_ids` were drafted."""
        ...

    @property
    def drafted(self) -> int:
        """How many tokens were proposed in this step."""
        ...

    @property
    def drafter(self) -> str: ...
    @property
    def finish(self) -> Finish | None: ...
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, told with a sample's first piece."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[Logprob | None] | None: ...


class Tokenizer(Protocol):
    """Text to tokens and back. Text of users is encoded as text; `add_special` adds only the model's own BOS."""

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def token_bytes(self, token: int, /) -> bytes: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]: ...


class Backend(Protocol):
    """The engine, as the server sees it."""

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def healthy(self) -> bool:
        """Whether the engine can still answer."""
        ...

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece, None]:
        """Answer one prompt; closing the generator aborts the request and frees everything it holds.

        Each of the n samples ends with exactly one piece whose `finish` is set. Refusals are raised before the first
        piece: RequestError and its kinds, CapacityError.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """A snapshot of counters and gauges; `snapshot.Snapshot` says which keys are read."""
        ...

    def describe(self) -> dict[str, Any]:
        """The resolved configuration."""
        ...

    def close(self) -> None: ...
