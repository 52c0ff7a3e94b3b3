"""Answer one prompt with speculation on, then plainly; show that the answers are the same and how fast each was.

make demo          or: python scripts/demo.py [MODEL] [--prompt TEXT]
"""

from __future__ import annotations

import argparse
import sys

from outrider import LLM, SamplingParams
from outrider.cli.chat import painted
from outrider.cli.footer import Record

PROMPT = "Write a Python class for a bank account with deposit, withdraw and balance methods, then show how to use it."


def answer(llm: LLM, prompt: list[int], params: SamplingParams, show: bool) -> tuple[list[int], Record]:
    """One answer's tokens and record; streamed to stdout where it is to be shown."""
    record, tokens = Record(), []
    for piece in llm.stream(prompt, params):
        record.add(piece)
        tokens += piece.token_ids
        if show:
            print(painted(piece, sys.stdout.isatty()), end="", flush=True)
    return tokens, record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    with LLM(options.model, prefix_caching=False) as llm:
        prompt = llm.tokenizer.chat([{"role": "user", "content": options.prompt}])
        guided = SamplingParams(temperature=0, max_tokens=options.max_tokens)
        plain = SamplingParams(temperature=0, max_tokens=options.max_tokens, extra_args={"speculative": False})
        for warm in (guided, plain):  # compile and touch the weights before anything is timed
            answer(llm, prompt, SamplingParams(temperature=0, max_tokens=8, extra_args=warm.extra_args), show=False)
        print(f"\n> {options.prompt}\n")
        tokens, fast = answer(llm, prompt, guided, show=True)
        expected, slow = answer(llm, prompt, plain, show=False)
    print(f"\n\nwith speculation: {fast.line()}")
    print(f"plain decoding:   {slow.line()}")
    print(
        f"same tokens: {'yes' if tokens == expected else 'NO'} · {fast.tokens_per_second / slow.tokens_per_second:.2f}x"
    )
    return 0 if tokens == expected else 1


if __name__ == "__main__":
    sys.exit(main())
