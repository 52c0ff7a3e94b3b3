"""Record greedy answers, and what smaller models would have drafted, for `outrider bench simulate --traces FILE`.

python scripts/record_traces.py smollm2-135m --per-task 10 --tokens 128 --out traces.jsonl
python scripts/record_traces.py TARGET --drafter small=SMALLER_MODEL --out traces.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider import LLM
from outrider.bench.traces import add_guesses, record_answers, write_traces
from outrider.bench.workloads import Prompt, load_prompts, read_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--data", help="folder with spec_bench.jsonl")
    parser.add_argument("--prompts", type=Path, help="instead: a file in its form (one object a line, task and turns)")
    parser.add_argument("--per-task", type=int, default=10, help="prompts per task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=MODEL", help="a smaller model")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with LLM(options.model, speculative_config=None, max_num_seqs=8, prefix_caching=False) as llm:
        traces = record_answers(llm, prompts(options), options.tokens)
    for entry in options.drafter:
        name, _, model = entry.partition("=")
        with LLM(model, speculative_config=None, max_num_seqs=1) as llm:
            traces = add_guesses(llm, name, traces)
    write_traces(options.out, traces)
    print(f"{len(traces)} answers, {sum(len(trace.output) for trace in traces)} tokens: {options.out}")
    return 0


def prompts(options: argparse.Namespace) -> list[Prompt]:
    """The wanted prompts, so many of each task."""
    if options.prompts is None:
        return load_prompts(options.data, None, options.per_task)
    read = read_prompts(options.prompts)
    tasks = dict.fromkeys(prompt.task for prompt in read)
    return [prompt for task in tasks for prompt in [p for p in read if p.task == task][: options.per_task]]


if __name__ == "__main__":
    sys.exit(main())
