"""A drafter of one's own in one file: it guesses that the text goes on as it did after the last line break.

python examples/drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider import LLM, SamplingParams
from outrider.drafters.base import Context, Need, Observation
from outrider.types import Draft


class LineDrafter:
    """Proposes the tokens that followed the previous occurrence of the last token of a line."""

    name = "line"
    needs: frozenset[Need] = frozenset()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        return [self._guess(context.tokens, depth) for context, depth in zip(contexts, depths, strict=True)]

    def _guess(self, tokens: Sequence[int], depth: int) -> Draft:
        last = tokens[-1]
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] == last:
                return Draft(tuple(tokens[place + 1 : place + 1 + depth]))
        return Draft()

    def observe(self, observations: Sequence[Observation]) -> None:
        """It looks at the text only."""

    def forget(self, sequence_id: int) -> None:
        """It holds nothing."""


if __name__ == "__main__":
    with LLM("smollm2-135m", speculative_config={"drafters": [LineDrafter()]}) as llm:
        message = [{"role": "user", "content": "Write the numbers from one to twenty, one on each line."}]
        output = llm.chat(message, SamplingParams(temperature=0, max_tokens=96))[0]
        print(output.outputs[0].text)
        print(f"acceptance length {output.metrics.speculative.acceptance_length:.2f}")
