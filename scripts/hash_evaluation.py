"""Write the hashes of the evaluation prompts in $OUTRIDER_DATA, which training data is checked against.

Try it: OUTRIDER_DATA=folder python scripts/hash_evaluation.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from outrider.distill.guard import hashes_of

TARGET = Path(__file__).parents[1] / "src" / "outrider" / "distill" / "evaluation_hashes.txt"


def records(name: str) -> list[dict]:
    """The lines of one file of the data folder."""
    with open(Path(os.environ["OUTRIDER_DATA"], name), encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def texts() -> list[str]:
    """Every evaluation prompt; of conversations every turn that is more than a few words."""
    turns = [turn for record in records("spec_bench.jsonl") for turn in record["turns"]]
    questions = [record["question"] for record in records("gsm8k_test.jsonl")]
    problems = [record["prompt"] for record in records("humaneval.jsonl")]
    docstrings = [problem.partition('"""')[2] for problem in problems]
    return [text for text in [*turns, *questions, *problems, *docstrings] if len(text.split()) >= 5]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if "OUTRIDER_DATA" not in os.environ:
        raise SystemExit("OUTRIDER_DATA is not set; name the folder that holds the evaluation prompts")
    lines = hashes_of(texts())
    TARGET.write_text("\n".join(lines) + "\n", encoding="ascii")
    print(f"{len(lines)} hashes in {TARGET.name}")
