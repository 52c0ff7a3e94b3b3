"""Any ways to speculate, as tables, measured in turns: speed over the first one, and acceptance length.

    OUTRIDER_DATA=FOLDER python scripts/ways.py smollm2-135m --kinds chat,maths,code --prompts 9 \\
        --way plain=null --way auto='"auto"' --way lookups='{"drafters": ["ngram", "suffix"], "length": "goodput"}'

Kinds are chat, maths and code as in scripts/acceptance.py, or tasks of Spec-Bench such as summarization. A way is a
name and a `speculative_config` in JSON. `outrider bench speed` does the same for the usual ways by name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.bench import record, speed, table
from outrider.bench.acceptance import load_suites
from outrider.bench.workloads import Prompt, data_folder, interleave, load_prompts
from outrider.cli.bench_speed import columns


def prompts_of(data: str | None, kinds: list[str], count: int) -> list[Prompt]:
    """At most so many prompts of every kind, interleaved."""
    folder = data_folder(data)
    suites = load_suites(folder, count) if folder else {}
    own = [[Prompt(kind, text) for text in suites[kind].openings] for kind in kinds if kind in suites]
    tasks = [kind for kind in kinds if kind not in suites]
    return interleave([*own, *([load_prompts(data, tasks, count)] if tasks else [])])


def way(text: str) -> speed.Mode:
    """NAME=JSON."""
    name, _, config = text.partition("=")
    return speed.Mode(name, json.loads(config))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--way", action="append", type=way, required=True, help="NAME=JSON; the first is the reference")
    parser.add_argument("--kinds", default="chat,maths,code", help="comma-separated")
    parser.add_argument("--prompts", type=int, default=9, help="of every kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--data", help="folder of prompts; default: OUTRIDER_DATA")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, show, print one JSON record."""
    given = parse()
    prompts = prompts_of(given.data, given.kinds.split(","), given.prompts)
    options: dict[str, Any] = {"max_num_seqs": given.concurrency, "max_model_len": 2048, "prefix_caching": False}
    sizes: dict[str, Any] = {"max_tokens": given.max_tokens, "repeats": given.repeats, "by_task": False}
    with LLM(given.model, speculative_config=None, **options) as llm:
        cases = speed.measure(llm, given.way, prompts, [given.concurrency], **sizes)
        rows = speed.rows_of(cases, len(given.way))
        table.show(rows, columns(given.way[0].name), f"ways to speculate, {given.model}")
        record.emit(record.new_record("ways", llm.describe(), rows), given.out)


if __name__ == "__main__":
    main()
