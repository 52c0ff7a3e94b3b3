"""A distillation run on a tiny target: it learns, resumes to the same bits, and refuses what does not fit."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distilling import SPEC, tiny_run, tiny_target
from outrider.distill import files, train
from outrider.distill.data import read_prompts
from outrider.distill.measure import measure
from outrider.distill.pipeline import Result, Run
from outrider.distill.shards import Answers
from outrider.errors import CapacityError, ChecksumError, ConfigError, ModelError
from outrider.models import eagle3_files
from outrider.models.eagle3_files import load_head


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Result]:
    run = tiny_run(tmp_path_factory.mktemp("finished"))
    return run, run.all()


class Killed(Exception):
    pass


def kill_at(stage: str, done: int) -> Callable[[str, int, int], None]:
    """A report that ends the run when a stage has come so far."""

    def report(name: str, at: int, total: int) -> None:
        if name == stage and at >= done:
            raise Killed

    return report


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return load_head(run.head_folder, SPEC).state_dict()


def test_the_loss_falls_and_drafts_are_accepted(finished: tuple[Run, Result]) -> None:
    run, result = finished
    first, last = result.history[0], result.history[-1]
    assert last["kl"] < 0.6 * first["kl"]
    assert last["right_0"] > first["right_0"]
    assert "right_2" in last
    assert result.scores["all"]["acceptance_length"] > 1.3
    low, high = result.scores["all"]["interval"]
    assert low <= result.scores["all"]["acceptance_length"] <= high
    page = (run.out / "report-generalist.html").read_text()
    assert page.count("<polyline") >= 4
    card = (run.head_folder / "README.md").read_text()
    assert all(word in card for word in ("Apache-2.0", '"seed": 0', "acceptance length", "prompts.jsonl"))


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, finished: tuple[Run, Result]) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(Killed):
        replace(run, report=kill_at("answering", 3)).all()
    written = {path: path.stat().st_mtime_ns for path in run.out.glob("answers/*.safetensors")}
    assert written
    with pytest.raises(Killed):
        replace(run, report=kill_at("training", 2 * train.LOG_EVERY)).all()
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    result = run.all()
    whole, expected = finished
    assert result.history == expected.history
    assert result.scores == expected.scores
    ours, theirs = weights_of(run), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_training_goes_on_with_the_answers_that_it_began_with(tmp_path: Path) -> None:
    """Answering that ran out of time does not go on when a killed training does."""
    run = tiny_run(tmp_path)
    with pytest.raises(Killed):
        replace(run, report=kill_at("answering", 3)).all()
    short = replace(run, options=replace(run.options, data_minutes=1e-9))
    with pytest.raises(Killed):
        replace(short, report=kill_at("training", 2 * train.LOG_EVERY)).all()
    shards = sorted(run.out.glob("answers/*.safetensors"))
    assert short.all().history
    assert sorted(run.out.glob("answers/*.safetensors")) == shards
    shutil.copyfile(shards[0], shards[0].with_name("answers-00099.safetensors"))
    shutil.copyfile(f"{shards[0]}.sha256", shards[0].with_name("answers-00099.safetensors.sha256"))
    with pytest.raises(ConfigError, match=r"made from \d shards .* others \(\d\); remove its training/"):
        short.train()


def test_other_settings_do_not_continue_a_run(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    with pytest.raises(ConfigError, match=r"answers .* max_tokens = 20, now it is 25"):
        replace(run, options=replace(run.options, max_tokens=25)).answer()
    with pytest.raises(ConfigError, match=r"checkpoints .* lr = 0.0025, now it is 0.1"):
        replace(run, options=replace(run.options, lr=0.1)).train()
    other = run.out / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "another {i}"}}\n' for i in range(18)))
    with pytest.raises(ConfigError, match=r"answers .* prompts = "):
        replace(run, data=other).answer()


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run.answer()
    shard = run.out / "answers" / "answers-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(ChecksumError, match=r"answers-00001.*remove it and run"):
        run.train()
    shard.unlink()
    run.answer()
    assert len(Answers(run.out / "answers").entries) == 18


def test_the_answers_of_another_run_are_trained_on_too(tmp_path: Path, finished: tuple[Run, Result]) -> None:
    first, _ = finished
    run = replace(tiny_run(tmp_path), also=(first.out,))
    run.options = replace(run.options, seed=1, epochs=1.0)
    run.answer()
    alone = len(Answers(run.out / "answers").training())
    run.train()
    card = (run.head_folder / "README.md").read_text()
    assert f"{alone + len(Answers(first.out / 'answers').training())} answers" in card
    plan = first.out / "answers" / "plan.json"
    other = tmp_path / "other" / "answers"
    other.mkdir(parents=True)
    (other / "plan.json").write_text(plan.read_text().replace('"layers"', '"other_layers"'))
    with pytest.raises(ConfigError, match="leave it out of --also"):
        replace(run, also=(tmp_path / "other",)).train()


def test_a_full_disk_at_export_keeps_the_old_head(
    finished: tuple[Run, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished
    before = weights_of(run)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(eagle3_files, "save_file", full)
    with pytest.raises(CapacityError, match="no space left for generalist"):
        run.train()
    after = weights_of(run)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), "safetensors"])
def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: object) -> None:
    run = tiny_run(tmp_path)
    raised = error if isinstance(error, OSError) else files.SafetensorError("I/O error: No space left (os error 28)")

    def full(*args: object, **kwargs: object) -> None:
        raise raised

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(CapacityError, match="no space left"):
        run.answer()
    assert not list(run.out.glob("answers/*.partial"))
    assert not list(run.out.glob("answers/*.safetensors"))


def test_a_head_of_another_target_is_refused(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    with pytest.raises(ModelError, match="hidden_size is 32, the target's is 64"):
        load_head(run.head_folder, replace(SPEC, hidden_size=64))
    with pytest.raises(ModelError, match="vocab_size is 320, the target's is 321"):
        load_head(run.head_folder, replace(SPEC, vocab_size=321))
    with pytest.raises(ModelError, match="the target's 2"):
        load_head(run.head_folder, replace(SPEC, num_layers=2))
    wide = tiny_target(spec=replace(SPEC, hidden_size=64))
    with pytest.raises(ModelError, match="trained for this target"):
        replace(run, loaded=wide, options=replace(run.options, init=str(run.head_folder), domain="maths")).train()


def test_a_specialist_starts_from_the_generalist(finished: tuple[Run, Result]) -> None:
    run, general = finished
    options = replace(run.options, domain="maths", init=str(run.head_folder), epochs=8.0)
    special = replace(run, options=options)
    result = special.train()
    assert special.head_folder.name == "maths"
    assert result.history[0]["kl"] < 0.7 * general.history[0]["kl"]
    kept = [load_head(folder, SPEC).t2d for folder in (special.head_folder, run.head_folder)]
    assert torch.equal(*kept)


def test_a_run_can_be_made_longer(finished: tuple[Run, Result], tmp_path: Path) -> None:
    run = tiny_run(tmp_path, epochs=3.0)
    first = run.all()
    second = replace(run, options=replace(run.options, epochs=6.0)).train()
    assert second.history[: len(first.history)] == first.history
    assert second.history[-1]["update"] == 2 * first.history[-1]["update"]


def test_minutes_become_a_number_of_updates(finished: tuple[Run, Result], tmp_path: Path) -> None:
    run, _ = finished
    short = replace(run, options=replace(run.options, domain="code", minutes=0.001))
    result = short.train()
    assert 1 <= result.history[-1]["update"] < 20


def test_attention_alignment_raises_what_the_head_captures(finished: tuple[Run, Result]) -> None:
    run, plain = finished
    options = replace(run.options, domain="chat", l_attn=2.0, l_attn_top=3, epochs=40.0)
    aligned = replace(run, options=options).train()
    assert aligned.history[-1]["attention"] < aligned.history[0]["attention"] - 0.05
    assert -1 <= aligned.history[-1]["attention"] < 0
    assert plain.history[-1]["attention"] == 0
    assert aligned.history[-1]["kl"] < aligned.history[0]["kl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domain": "cooking"}, "domain"),
        ({"dropout": 1.0}, "dropout"),
        ({"taps": (1, 2)}, "three layers"),
        ({"holdout": 1}, "holdout"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(tmp_path, **changes)


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [(1, {"holdout": 1000}, "kept for evaluation"), (18, {"kind": "model", "layers": (0, 99)}, "layers")],
)
def test_what_could_not_end_well_is_refused_before_answering(
    tmp_path: Path, count: int, changes: dict, message: str
) -> None:
    run = tiny_run(tmp_path, count=count, **changes)
    with pytest.raises(ConfigError, match=message):
        run.all()
    assert not (tmp_path / "answers").exists()


def test_targets_without_three_layers_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, loaded=tiny_target(spec=replace(SPEC, num_layers=2)))
    with pytest.raises(ConfigError, match="has 2 layers"):
        run.answer()


def test_acceptance_is_measured_in_the_engine(finished: tuple[Run, Result]) -> None:
    run, _ = finished
    prompts = read_prompts(run.data)[:4]
    tallies = measure(run.loaded, ["ngram"], prompts, depth=3, max_tokens=60, backend="reference", max_model_len=120)
    assert set(tallies) == {"chat", "maths", "code", "all"}
    total = tallies["all"]
    assert total.drafts == sum(tallies[name].drafts for name in ("chat", "maths", "code")) > 0
    assert 1 < total.acceptance_length <= 4
