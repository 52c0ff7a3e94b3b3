"""Answer several prompts together and see what speculation gave: python examples/generate.py"""

from outrider import LLM, SamplingParams

PROMPTS = [
    "Write a haiku about the sea.",
    "List the first ten prime numbers and their squares.",
    "Write a Python function that reverses a linked list.",
]

with LLM("smollm2-135m") as llm:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(
        PROMPTS, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64)), strict=True
    ):
        speculative = output.metrics.speculative
        print(f"> {prompt}\n{output.outputs[0].text}")
        print(f"  acceptance length {speculative.acceptance_length:.2f} over {speculative.num_drafts} drafts\n")
