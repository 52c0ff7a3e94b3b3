"""Kept prompts of a model in a GGUF file, whose vectors and matrices are read in different ways."""

from __future__ import annotations

from loading import llama_gguf
from outrider import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5 + i % 40 for i in range(50)]


def test_a_later_start_finds_the_prompt_of_a_gguf_model(tmp_path) -> None:
    path = str(llama_gguf(tmp_path / "model.gguf"))
    context = {"kv_path": str(tmp_path / "kept"), "keep_prompts": 16, "window": 16}
    found = []
    for _ in range(2):
        with LLM(path, page_size=8, speculative_config=None, context_config=context) as llm:
            output = llm.generate([PROMPT], GREEDY)[0]
        found.append((output.outputs[0].token_ids, output.metrics.cached_tokens))
    assert found == [(found[0][0], 0), (found[0][0], 48)]
