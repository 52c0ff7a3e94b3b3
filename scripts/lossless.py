"""Compare speculation with plain decoding, token by token, over all prompts of a data folder; one JSON record.

python scripts/lossless.py smollm2-135m --data FOLDER --out lossless.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.bench.lossless import check
from outrider.bench.record import emit, new_record
from outrider.bench.workloads import load_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--data", help="folder with spec_bench.jsonl")
    parser.add_argument("--per-task", type=int, help="prompts per task; default: all")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: seeded sampling")
    parser.add_argument("--kv-memory", type=int, default=4096, help="MiB of keys and values")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prompts = load_prompts(options.data, None, options.per_task)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=1)
    # Room for the KV of all prompts, so that each is read once and found again by every later run.
    with LLM(options.model, max_num_seqs=8, kv_memory=options.kv_memory << 20) as llm:
        rows = check(llm, prompts, (1, 2, 5, 8), (1, 8), params)
        config = llm.describe()
    emit(new_record("lossless", config, rows), options.out)
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
