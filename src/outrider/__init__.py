"""Outrider runs language models with small models riding ahead of the large one. See README.md.

from outrider import LLM, SamplingParams

llm = LLM("smollm2-135m")
print(llm.generate("Why is the sky blue?", SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.outputs import CompletionOutput, Piece, RequestOutput
    from outrider.api.service import Service

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Piece", "RequestOutput", "SamplingParams", "Service", "__version__"]

_HOMES = {
    "LLM": "outrider.api.llm",
    "CompletionOutput": "outrider.api.outputs",
    "Piece": "outrider.api.outputs",
    "RequestOutput": "outrider.api.outputs",
    "Service": "outrider.api.service",
}


def __getattr__(name: str) -> Any:
    """Import the heavy parts on first use, so that `outrider --help` answers at once."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
