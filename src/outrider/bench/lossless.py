"""Does speculation change a token? Every prompt is answered plainly and with each draft length, alone and in batches.

python scripts/lossless.py smollm2-135m --data FOLDER --out lossless.json
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from outrider.api.llm import LLM
from outrider.bench.record import note
from outrider.bench.speed import total
from outrider.bench.workloads import Prompt
from outrider.types import SamplingParams


def check(
    llm: LLM, prompts: Sequence[Prompt], depths: Sequence[int], batches: Sequence[int], params: SamplingParams
) -> list[dict[str, Any]]:
    """A row per draft length and batch size: how many answers differ from plain ones, and what was drafted."""
    llm.set_speculative_config(None)
    expected = answers(llm, prompts, 1, params)[0]
    rows = []
    for batch in batches:
        for depth in (0, *depths):
            llm.set_speculative_config({"num_speculative_tokens": depth} if depth else None)
            started = perf_counter()
            tokens, outputs = answers(llm, prompts, batch, params)
            speculative = total(outputs)
            rows.append(
                {
                    "batch": batch,
                    "num_speculative_tokens": depth,
                    "prompts": len(prompts),
                    "tokens": sum(map(len, tokens)),
                    "different": sum(mine != theirs for mine, theirs in zip(tokens, expected, strict=True)),
                    "drafted": speculative.num_draft_tokens,
                    "accepted": speculative.num_accepted_tokens,
                    "seconds": perf_counter() - started,
                }
            )
            note(f"batch {batch}, {depth} drafted: {rows[-1]['different']} of {len(prompts)} answers differ")
    return rows


def answers(llm: LLM, prompts: Sequence[Prompt], batch: int, params: SamplingParams) -> tuple[list[list[int]], list]:
    """Token ids of all answers, `batch` prompts at a time, and the outputs they come from."""
    outputs = []
    messages = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    for at in range(0, len(messages), batch):
        outputs += llm.chat(messages[at : at + batch], params)
    return [output.outputs[0].token_ids for output in outputs], outputs
