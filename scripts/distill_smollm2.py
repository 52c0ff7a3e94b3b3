"""The recipe of the shipped SmolLM2-135M heads: prompts, answers, training, evaluation, export.

    python scripts/distill_smollm2.py --out runs/smollm2 --minutes 40

Prompts are written by rule (distill/prompts.py), invented by the target (distill/invent.py) and, where $OUTRIDER_DATA
holds them, taken from gsm8k_train.jsonl; passages for summaries come from war_and_peace.txt there. Evaluation sets are
never read. Everything is resumable: run the same command again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cli.distill import bars
from outrider.distill.data import DOMAINS, Prompt, distinct, write_prompts
from outrider.distill.invent import invent_prompts
from outrider.distill.options import DistillOptions
from outrider.distill.pipeline import Result, Run
from outrider.distill.prompts import passages_of
from outrider.distill.prompts import write_prompts as written
from outrider.distill.target import Target
from outrider.drafters.shipped import ROOT, install_head
from outrider.models.eagle3 import default_taps
from outrider.models.load import load_model

WRITTEN = {"chat": 2400, "maths": 600, "code": 2600}
MATHS_QUESTIONS = 2600
INVENTED = 600
PASSAGES = 1600
SETTINGS: dict[str, Any] = {"max_tokens": 200, "max_prompt": 512, "batch": 32}
TRAINING: dict[str, Any] = {"intermediate_size": 1024, "tokens_per_update": 600, "epochs": 4.0}
SPECIALIST: dict[str, Any] = {
    "lr": 1e-3,
    "unroll_from": 0.0,
    "intermediate_size": None,
}  # shaped as the generalist


def data_file(name: str) -> str:
    """The text of a file in $OUTRIDER_DATA; empty where there is none."""
    path = Path(os.environ.get("OUTRIDER_DATA", ""), name)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def questions(seed: int) -> list[Prompt]:
    """Word problems of GSM8K's training split."""
    lines = [line for line in data_file("gsm8k_train.jsonl").split("\n") if line]
    random.Random(seed).shuffle(lines)
    return [Prompt((("user", json.loads(line)["question"]),), "maths") for line in lines[:MATHS_QUESTIONS]]


def all_prompts(target: Target, seed: int) -> list[Prompt]:
    """Every prompt, shuffled, so that any beginning of the file is a fair sample of it."""
    passages = passages_of(data_file("war_and_peace.txt"), PASSAGES, seed, words=(50, 180))
    prompts = [prompt for domain, count in WRITTEN.items() for prompt in written(domain, count, seed, passages)]
    prompts += questions(seed) + sorted(invent_prompts(target, INVENTED, seed), key=lambda prompt: prompt.text)
    random.Random(seed).shuffle(prompts)
    return distinct(prompts)


def make_prompts(model: str, path: Path, seed: int) -> None:
    """Write the prompts once."""
    if not path.exists():
        loaded = load_model(model)
        target = Target(loaded, default_taps(loaded.spec.num_layers), batch=32, max_model_len=512)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(path, all_prompts(target, seed))


def distil(model: str, out: Path, options: DistillOptions, threads: int | None, answer: bool) -> Result:
    """One head: a generalist or a specialist."""
    with bars() as report:
        run = Run(load_model(model), out / "prompts.jsonl", out, options, report, threads=threads)
        return run.all() if answer else run.train()


def install(result: Result, model: str, name: str) -> None:
    """Put a head, in its compact form, among those that come with its target."""
    folder = ROOT / Path(model).name / name
    install_head(result.folder, load_model(model), folder)
    print(f"{folder}: acceptance length {result.scores['all']['acceptance_length']:.2f}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, help="of training the generalist")
    parser.add_argument("--specialist-minutes", type=float, help="of training each specialist; none without it")
    parser.add_argument("--data-minutes", type=float, help="of answering")
    parser.add_argument("--no-answers", action="store_true", help="train on the answers that are there")
    parser.add_argument("--install", action="store_true", help="put the heads, in 8 bits, into the package")
    return parser.parse_args()


def main() -> None:
    """The generalist, then the specialists that go on from it."""
    given = parse()
    make_prompts(given.model, given.out / "prompts.jsonl", given.seed)
    length: dict[str, Any] = {"minutes": given.minutes, "data_minutes": given.data_minutes}
    options = DistillOptions(seed=given.seed, **length, **SETTINGS, **TRAINING)
    results = {"generalist": distil(given.model, given.out, options, given.threads, not given.no_answers)}
    for domain in DOMAINS if given.specialist_minutes else ():
        start = str(results["generalist"].folder)
        own: dict[str, Any] = {"domain": domain, "minutes": given.specialist_minutes, **SPECIALIST}
        special = replace(options, init=start, **own)
        results[domain] = distil(given.model, given.out, special, given.threads, answer=False)
    for name, result in results.items() if given.install else ():
        install(result, given.model, name)


if __name__ == "__main__":
    main()
