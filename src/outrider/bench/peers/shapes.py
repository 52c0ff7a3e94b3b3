"""The prompts of a comparison: real text, cut to the length that is asked for."""

from __future__ import annotations

from outrider.bench.peers.compare import Shape
from outrider.bench.workloads import OWN, read_prompts
from outrider.models.load import Tokenizer


def make_shapes(tokenizer: Tokenizer, streams: int, prefill: int, count: int) -> list[Shape]:
    """One stream, several streams (prompts of one length, which every engine can batch), and a prefill."""
    text = " ".join(prompt.text for prompt in read_prompts(OWN))
    ids = tokenizer.encode(text)
    while len(ids) < max(prefill, 64 + 16 * streams):
        ids += ids
    shapes = [Shape("decode", [ids[:64]], count)]
    if streams > 1:
        shapes.append(Shape(f"decode x{streams}", [ids[16 * i : 16 * i + 64] for i in range(streams)], count))
    if prefill:
        shapes.append(Shape(f"prefill {prefill}", [ids[:prefill]], 1))
    return shapes
