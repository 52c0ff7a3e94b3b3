"""`outrider generate MODEL -p TEXT`: one answer, streamed to stdout, or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from outrider.cli import options as opt
from outrider.cli.footer import footer
from outrider.errors import RequestError


@opt.takes_options
def generate(
    model: Annotated[str, typer.Argument(help="Alias, folder, .gguf file or hub id.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus: smallest set of tokens with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k best tokens; 0: all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    *,
    shared: opt.Shared,
) -> None:
    """Answer one prompt.

    Example: outrider generate smollm2-135m -p "Why is the sky blue?" --max-tokens 64
    """
    from outrider.types import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, stop=stop, seed=shared.seed
    )
    with shared.open(model) as llm:
        chat = llm.tokenizer.has_chat_template and not raw
        ids = llm.tokenizer.chat([{"role": "user", "content": text}]) if chat else text
        if json_output:
            output = llm.generate([ids], params)[0]
            print(json.dumps(output.to_dict(), ensure_ascii=False))
            for sample in output.outputs:
                check(sample.finish_reason, sample.stop_reason)
            return
        with footer(llm.context_mode) as record:
            for piece in llm.stream(ids, params):
                record.add(piece)
                print(piece.text, end="", flush=True)
                if piece.finish is not None:
                    check(*piece.finish)
            print()


def check(reason: str | None, detail: str | int | None) -> None:
    """An answer that ended with an error is an error of the command."""
    if reason == "error":
        raise RequestError(str(detail))
