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
    def request_id(self) -> str:
        """The id that the stream was asked with."""
        ...

    @property
    def index(self) -> int:
        """Which of the n samples."""
        ...

    @property
    def text(self) -> str:
        """What became safe to show in this step; may be empty."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of this step."""
        ...

    @property
    def logprobs(self) -> Sequence[Logprob]:
        """One for each of `token_ids`, where asked for."""
        ...

    @property
    def accepted(self) -> int:
        """The first `accepted` of `token_ids` were drafted."""
        ...

    @property
    def drafted(self) -> int:
        """How many tokens were proposed in this step."""
        ...

    @property
    def drafter(self) -> str:
        """Who drafted the accepted ones."""
        ...

    @property
    def finish(self) -> Finish | None:
        """Set on a sample's last piece."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, told with a sample's first piece."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[Logprob | None] | None:
        """One for each prompt token (the first has none), on the first piece, where asked for."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back. Text of users is encoded as text; `add_special` adds only the model's own BOS."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can render."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens, control tokens included."""
        ...

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of tokens; control tokens are left out."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """The bytes that a token stands for."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation. UnsupportedError where the template refuses it."""
        ...


class Backend(Protocol):
    """The engine, as the server sees it."""

    @property
    def model_name(self) -> str:
        """What the engine calls its model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; may be used from any thread."""
        ...

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

    def close(self) -> None:
        """Let go of the model; open streams end with an error."""
        ...
