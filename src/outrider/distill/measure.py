"""Acceptance in the real engine: held-out prompts are answered with the drafter on, and its drafts are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.api.llm import LLM
from outrider.api.outputs import SpeculativeMetrics
from outrider.distill.acceptance import Tally
from outrider.distill.data import Prompt
from outrider.models.load import LoadedModel
from outrider.types import SamplingParams


def measure(
    loaded: LoadedModel,
    drafters: Sequence[Any],
    prompts: Sequence[Prompt],
    *,
    depth: int = 4,
    max_tokens: int = 256,
    **options: Any,
) -> dict[str, Tally]:
    """Tallies by domain, and of "all", of greedy answers with chains of `depth` tokens.

    drafters: as in speculative_config; options: those of LLM.
    """
    table: Mapping[str, Any] = {"drafters": list(drafters), "num_speculative_tokens": depth}
    tallies: dict[str, Tally] = {}
    with LLM(loaded, speculative_config=table, **options) as llm:
        messages = [[{"role": role, "content": text} for role, text in prompt.messages] for prompt in prompts]
        outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        for name in (prompt.domain, "all"):
            tallies.setdefault(name, Tally()).count(*_counts(output.metrics.speculative))
    return tallies


def _counts(metrics: SpeculativeMetrics) -> tuple[int, list[int]]:
    return metrics.num_drafts, metrics.accepted_per_position
