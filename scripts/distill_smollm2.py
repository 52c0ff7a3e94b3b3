"""The recipe of the shipped SmolLM2-135M heads: prompts, answers, training, evaluation, export.

    python scripts/distill_smollm2.py --out runs/smollm2 --minutes 40

Prompts are written by rule (distill/prompts.py), invented by the target (distill/invent.py) and, where $OUTRIDER_DATA
holds them, taken from gsm8k_train.jsonl; passages for summaries come from war_and_peace.txt there. Evaluation sets are
never read. Everything is resumable: run the same command again.

    python scripts/distill_smollm2.py --out runs/second --after runs/smollm2 --minutes 60

is a second round: new prompts, half of which lean on the answers of the first (distill/follow.py), and a head that goes
on from the first one's, trained on the answers of both. A third one goes on from the head that comes with the model:

    python scripts/distill_smollm2.py --out runs/third-a --seed 2 --data-minutes 15 --answers-only
    python scripts/distill_smollm2.py --out runs/third-b --seed 3 --after runs/third-a --init generalist --minutes 60

Another target (--model) takes the same; a large one invents slowly, and does as well with what a small one asked:

    python scripts/distill_smollm2.py --model qwen2.5-coder-1.5b --out runs/qwen --prompts runs/third-a/prompts.jsonl
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
from outrider.distill.data import DOMAINS, Prompt, distinct, read_prompts, write_prompts
from outrider.distill.follow import Spoken, follow_prompts
from outrider.distill.invent import OPENINGS, invent_prompts
from outrider.distill.options import DistillOptions
from outrider.distill.pipeline import Result, Run
from outrider.distill.prompt_library import library_functions
from outrider.distill.prompts import passages_of
from outrider.distill.prompts import write_prompts as written
from outrider.distill.shards import Answers
from outrider.distill.target import Target
from outrider.drafters.shipped import ROOT, install_head, shipped_heads
from outrider.models.eagle3 import default_taps
from outrider.models.eagle3_store import head_taps
from outrider.models.load import load_model

WRITTEN = {"chat": 2400, "maths": 600, "code": 2600}
MATHS_QUESTIONS = 2600
INVENTED = 3000
LIBRARY = 800  # functions of Python's standard library, to be completed
PASSAGES = 1600
LONGEST, LONGER = 180, 420  # words of a passage, in the first round and the second
FOLLOWING = 4000
SETTINGS: dict[str, Any] = {"max_tokens": 200, "max_prompt": 512, "batch": 32}
SECOND: dict[str, Any] = {"max_prompt": 1024, "lr": 1.5e-3, "unroll_from": 0.3}  # longer: texts are in these prompts
TRAINING: dict[str, Any] = {"intermediate_size": 1024, "tokens_per_update": 600, "epochs": 4.0}
SPECIALIST: dict[str, Any] = {
    "lr": 8e-4,
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


def completions(seed: int) -> list[Prompt]:
    """Headers of library functions."""
    headers = library_functions()
    random.Random(seed).shuffle(headers)
    return [Prompt((("user", header),), "code") for header in headers[:LIBRARY]]


def all_prompts(target: Target, seed: int, longest: int) -> list[Prompt]:
    """Every prompt, shuffled, so that any beginning of the file is a fair sample; passages of 50 to `longest` words."""
    passages = passages_of(data_file("war_and_peace.txt"), PASSAGES, seed, words=(50, longest))
    prompts = [prompt for domain, count in WRITTEN.items() for prompt in written(domain, count, seed, passages)]
    prompts += questions(seed) + completions(seed)
    prompts += sorted(invent_prompts(target, INVENTED, seed, openings=OPENINGS), key=lambda prompt: prompt.text)
    random.Random(seed).shuffle(prompts)
    return distinct(prompts)


def spoken(target: Target, run: Path) -> list[Spoken]:
    """What an earlier run asked and was answered, its held-out prompts left out."""
    asked = {prompt.key: prompt for prompt in read_prompts(run / "prompts.jsonl")}
    answers = Answers(run / "answers", verify=False)
    return [
        (asked[entry.key], target.tokenizer.decode(answers.tokens(entry)[entry.prompt_length :].tolist()).strip())
        for entry in answers.training()
        if entry.key in asked
    ]


def make_prompts(given: argparse.Namespace, path: Path) -> None:
    """Write the prompts once; those of a second round are other ones, and half of them lean on the first."""
    if path.exists():
        return
    if given.prompts:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(path, read_prompts(given.prompts))
        return
    loaded = load_model(given.model)
    target = Target(loaded, default_taps(loaded.spec.num_layers), batch=32, max_model_len=512, threads=given.threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = all_prompts(target, given.seed, LONGER if given.after else LONGEST)
    if given.after:
        known = {prompt.key for prompt in read_prompts(given.after / "prompts.jsonl")}
        prompts += follow_prompts(spoken(target, given.after), FOLLOWING, given.seed)
        prompts = [prompt for prompt in prompts if prompt.key not in known]
        random.Random(given.seed).shuffle(prompts)
    write_prompts(path, prompts)


def distil(given: argparse.Namespace, options: DistillOptions, answer: bool) -> Result | None:
    """One head: a generalist or a specialist; none where only answers are asked for."""
    prompts, also = given.out / "prompts.jsonl", (given.after,) if given.after else ()
    with bars() as report:
        run = Run(load_model(given.model), prompts, given.out, options, report, threads=given.threads, also=also)
        if answer:
            run.answer()
        return None if given.answers_only else run.train()


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
    parser.add_argument("--after", type=Path, help="an earlier --out: this is a second round")
    parser.add_argument("--prompts", type=Path, help="take the prompts of this file; default: written and invented")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, help="of training the generalist")
    parser.add_argument("--specialist-minutes", type=float, help="of training each specialist; none without it")
    parser.add_argument("--data-minutes", type=float, help="of answering")
    parser.add_argument("--no-answers", action="store_true", help="train on the answers that are there")
    parser.add_argument("--answers-only", action="store_true", help="train nothing")
    parser.add_argument("--init", help="go on from this head: a folder, or the name of one that comes with the model")
    parser.add_argument("--install", action="store_true", help="put the heads, in 8 bits, into the package")
    return parser.parse_args()


def options_of(given: argparse.Namespace) -> DistillOptions:
    """Settings of the generalist."""
    settings = {**SETTINGS, **TRAINING, "minutes": given.minutes, "data_minutes": given.data_minutes}
    if given.after:
        settings |= {**SECOND, "init": given.init or str(given.after / "heads" / "generalist")}
    if given.init:
        settings["init"] = str(shipped_heads(load_model(given.model)).get(given.init, given.init))
        head_taps(settings["init"], load_model(given.model).spec)  # ModelError where it is no head of this target
    if settings.get("init"):
        settings["intermediate_size"] = None  # that of the head
    return DistillOptions(seed=given.seed, **settings)


def main() -> None:
    """The generalist, then the specialists that go on from it."""
    given = parse()
    options = options_of(given)  # refused before the prompts are made
    make_prompts(given, given.out / "prompts.jsonl")
    generalist = distil(given, options, not given.no_answers)
    if generalist is None:
        return
    results = {"generalist": generalist}
    for domain in DOMAINS if given.specialist_minutes else ():
        start = str(results["generalist"].folder)
        own: dict[str, Any] = {"domain": domain, "minutes": given.specialist_minutes, **SPECIALIST}
        special = distil(given, replace(options, init=start, **own), answer=False)
        assert special is not None, "only --answers-only trains nothing"
        results[domain] = special
    for name, result in results.items() if given.install else ():
        install(result, given.model, name)


if __name__ == "__main__":
    main()
