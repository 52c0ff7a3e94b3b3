"""What a peer must do to be compared: answer the same token ids, greedily, with the same number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from outrider.errors import ConfigError


class Timing(NamedTuple):
    """Seconds to the first token (prefill) and for all the following ones."""

    first_s: float
    rest_s: float
    tokens: int  # behind the first ones, over all streams

    @property
    def tokens_per_second(self) -> float:
        """Decode speed behind the first token."""
        return self.tokens / self.rest_s


class Peer(Protocol):
    """One engine with one loaded model."""

    name: str
    version: str
    settings: dict[str, Any]

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Timing:
        """Answer the prompts together with exactly `count` tokens each; no state is kept between calls."""
        ...

    def close(self) -> None: ...


#: name -> (module, what pip installs it)
PEERS = {
    "outrider": ("ours", "outrider"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("hf", "transformers"),
    "openvino": ("openvino", "openvino-genai"),
}


def opener(name: str) -> Callable[..., Peer]:
    """The `open_peer(model, threads, context, streams)` of a peer; a clear error where it is not installed."""
    if name not in PEERS:
        raise ConfigError.unknown(name, PEERS, "--peers")
    module, package = PEERS[name]
    try:
        return import_module(f"outrider.bench.peers.{module}").open_peer
    except ImportError as error:
        raise ConfigError(f"peer {name!r} is not installed ({error}); pip install {package}", "--peers") from None
