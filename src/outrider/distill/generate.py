"""The first stage: the target answers every prompt, and its states go to shards. It goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from outrider.distill.data import Prompt, digest_of_prompts, is_held_out
from outrider.distill.files import read_json, write_json
from outrider.distill.options import DistillOptions, check_same
from outrider.distill.shards import ShardWriter
from outrider.distill.target import Answer, Job, Target
from outrider.errors import ConfigError
from outrider.types import SamplingParams

#: Called with what is being done, how much of it is done and how much there is.
Report = Callable[[str, int, int], None]


def generate(
    target: Target,
    prompts: Sequence[Prompt],
    options: DistillOptions,
    folder: Path,
    report: Report,
    enough: bool = False,
) -> None:
    """Fill `folder` with shards of `shard_prompts` answers each; those that are there already are kept.

    `data_minutes` ends the stage early; shards that are incomplete by then are left out. `enough`: add none.
    """
    started = monotonic()
    _check_plan(target, prompts, options, folder)
    if enough:
        return
    writer = ShardWriter(folder)
    encoded = [target.encode(prompt) for prompt in prompts]
    usable = [i for i, ids in enumerate(encoded) if len(ids) <= options.max_prompt]
    if not usable:
        raise ConfigError(f"every prompt is longer than {options.max_prompt} tokens; raise max_prompt", "max_prompt")
    shards = [usable[i : i + options.shard_prompts] for i in range(0, len(usable), options.shard_prompts)]
    missing = [number for number in range(len(shards)) if not writer.has(number)]
    done, total = len(shards) - len(missing), len(shards)
    report("answering", done, total)
    shard_of = {index: number for number in missing for index in shards[number]}
    collected: dict[int, dict[int, Answer]] = {number: {} for number in missing}
    for index, answer in target.answers(_jobs(shard_of, encoded, options)):
        number = shard_of[index]
        collected[number][index] = answer
        if len(collected[number]) == len(shards[number]):
            answers = collected.pop(number)
            facts = [_facts(prompts[i], options) for i in shards[number]]
            writer.write(number, [answers[i] for i in shards[number]], facts)
            done += 1
            report("answering", done, total)
            if options.data_minutes is not None and monotonic() - started > 60 * options.data_minutes:
                return


def _jobs(indices: dict[int, int], encoded: Sequence[tuple[int, ...]], options: DistillOptions) -> Iterator[Job]:
    for index in indices:
        params = SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed * 1_000_003 + index
        )
        yield Job(index, encoded[index], params)


def _facts(prompt: Prompt, options: DistillOptions) -> dict[str, Any]:
    return {"domain": prompt.domain, "held_out": is_held_out(prompt, options.holdout), "key": prompt.key}


def check_alike(folder: Path, other: Path) -> None:
    """Refuse to train on the answers of two runs that are of different targets or captured different layers."""
    plans = [read_json(path / "plan.json") or {} for path in (folder, other)]
    if any(plans[0].get(name) != plans[1].get(name) for name in ("model", "layers")):
        raise ConfigError(f"{other} holds no answers of this target and these layers; leave it out of --also", "also")


def _check_plan(target: Target, prompts: Sequence[Prompt], options: DistillOptions, folder: Path) -> None:
    """Write down what the shards are made from, or refuse to mix them with others."""
    names = ("seed", "max_tokens", "max_prompt", "temperature", "shard_prompts", "holdout")
    spec = target.spec
    plan = {
        "prompts": digest_of_prompts(prompts),
        "model": [spec.family, spec.num_layers, spec.hidden_size, spec.vocab_size],
        "layers": list(target.decoder.taps),
        **{name: getattr(options, name) for name in names},
    }
    stored = read_json(folder / "plan.json")
    if stored is not None:
        check_same(stored, plan, "answers")
    write_json(folder / "plan.json", plan)
