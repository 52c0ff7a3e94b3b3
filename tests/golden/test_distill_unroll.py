"""Unrolled training against step-by-step drafting, captured states against the decoder, attention against a layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import Driver
from torch.nn import functional as F

from distilling import SPEC, TAPS, tiny_run
from outrider.distill import acceptance
from outrider.distill.batches import Scale, TrainBatch, make_batch, plan_epoch
from outrider.distill.data import read_prompts
from outrider.distill.head_task import HeadTask, right_steps
from outrider.distill.initial import fold_scale, new_head
from outrider.distill.losses import attention_alignment
from outrider.distill.options import DistillOptions
from outrider.distill.pipeline import Run
from outrider.distill.shape import draft_weights, head_spec, target_weights
from outrider.distill.shards import Answers, Entry
from outrider.distill.student import new_student
from outrider.distill.teacher import Teacher, TeacherAttention
from outrider.distill.unroll import unroll
from outrider.memory.shapes import SHAPES
from outrider.models.decoder import ReferenceDecoder
from outrider.models.eagle3 import Eagle3Head, HeadStep
from outrider.models.eagle3_files import load_head
from outrider.models.load import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = tiny_run(tmp_path_factory.mktemp("unroll"), count=8)
    run.answer()
    return run


@pytest.fixture(scope="module")
def answers(run: Run) -> Answers:
    return Answers(run.out / "answers")


@pytest.fixture(scope="module")
def scale(answers: Answers) -> Scale:
    return Scale.measure(answers, answers.entries, len(TAPS), clamp=8.0)


def make_head(run: Run) -> tuple[Eagle3Head, Teacher]:
    """A head whose every weight matters."""
    kept = list(range(50, 114))
    teacher = Teacher(run.loaded, kept, CPU)
    head = new_head(head_spec(SPEC, run.options), kept, teacher, seed=3).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return head, teacher


def stepwise(head: Eagle3Head, batch: TrainBatch, embedding: torch.Tensor, row: int, depth: int) -> list[HeadStep]:
    """What a drafter does at one row of one sequence: known slots first, then its own states, a token at a time."""
    states = torch.cat([batch.prompt.states, batch.answer.states], dim=2)
    tokens = torch.cat([batch.prompt.next_tokens, batch.answer.next_tokens], dim=1)
    slot = batch.prompt.states.shape[2] + row
    g, e = head.fuse(states), F.embedding(tokens, embedding)
    positions = torch.arange(tokens.shape[1])[None]
    kv = head.prefill(g[:, :slot], e[:, :slot], positions[:, :slot])
    steps = [head.step(g[:, slot : slot + 1], e[:, slot : slot + 1], positions[:, slot : slot + 1], kv)]
    for i in range(slot + 1, slot + depth):
        last = steps[-1]
        steps.append(head.step(last.h, e[:, i : i + 1], positions[:, i : i + 1], last.kv))
    return steps


def test_unrolled_rows_are_those_of_step_by_step_drafting(run: Run, answers: Answers, scale: Scale) -> None:
    head, teacher = make_head(run)
    batch = make_batch(answers, answers.entries[:3], scale)
    unrolled = [(step.h, real) for step, real in unroll(head, batch, teacher.embedding, steps=4)]
    compared = 0
    for number, entry in enumerate(answers.entries[:3]):
        alone = make_batch(answers, [entry], scale)
        for row in range(0, entry.rows - 4, 3):
            for i, step in enumerate(stepwise(head, alone, teacher.embedding, row, depth=4)):
                h, real = unrolled[i]
                assert real[number, row + i]
                assert torch.allclose(h[number, row + i], step.h[0, 0], atol=2e-5)
                compared += 1
    assert compared > 30


def test_a_folded_head_takes_the_states_as_they_are(run: Run, answers: Answers, scale: Scale) -> None:
    head, teacher = make_head(run)
    entry = answers.entries[0]
    scaled = make_batch(answers, [entry], scale)
    plain = make_batch(answers, [entry], Scale([1.0] * len(TAPS), clamp=1e9))
    expected = next(unroll(head, scaled, teacher.embedding, 1))[0].logits
    fold_scale(head, scale)
    assert torch.allclose(next(unroll(head, plain, teacher.embedding, 1))[0].logits, expected, atol=1e-4)


def test_huge_states_are_clamped_as_one(answers: Answers) -> None:
    states = torch.ones(3, 4, 8)
    states[:, 1] *= torch.tensor([1e4, 10.0, 2.0]).view(3, 1)
    scaled = Scale([1.0, 1.0, 1.0], clamp=8.0).apply(states)
    assert torch.equal(scaled[:, 0], states[:, 0])
    assert torch.allclose(scaled[0, 1], torch.full((8,), 8.0))
    assert torch.allclose(F.normalize(scaled[:, 1].flatten(), dim=0), F.normalize(states[:, 1].flatten(), dim=0))


def test_captured_states_and_teacher_are_the_targets(run: Run, answers: Answers) -> None:
    decoder = ReferenceDecoder.build(SPEC, run.loaded.weights, taps=(*TAPS, 3))
    teacher = Teacher(run.loaded, range(SPEC.vocab_size), CPU)
    for entry in answers.entries[:2]:
        driver = Driver(decoder)
        tokens = answers.tokens(entry)[:-1].tolist()
        logits = torch.from_numpy(driver.step({0: tokens})[0])
        features = torch.from_numpy(driver.result.features)
        assert torch.allclose(answers.states(entry), features, rtol=2e-3, atol=2e-3)
        assert torch.allclose(teacher.logits(answers.states(entry)[-1]), logits, atol=2e-2)


def test_attention_of_the_next_layer_follows_from_a_tapped_state(run: Run, answers: Answers) -> None:
    """Replacing a layer's attention by the recomputed weights must give that layer's output."""
    attention = TeacherAttention(run.loaded, TAPS, top=3, device=CPU)
    assert attention.layers == {0: 1, 1: 2, 2: 3}
    entry = answers.entries[0]
    states = answers.states(entry)
    count = states.shape[1]
    maps = attention.weights(1, states[0][None], torch.arange(count)[None], torch.ones(count, count).tril().bool())
    w = {
        name: torch.from_numpy(run.loaded.weights[f"layers.1.{name}"].dense())
        for name in ("v", "o", "gate", "up", "down")
    }

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SPEC.norm_eps)

    v = (rms(states[0]) @ w["v"].T).view(count, 2, 8).repeat_interleave(2, dim=1).transpose(0, 1)
    x = states[0] + (maps[0] @ v).transpose(0, 1).flatten(1) @ w["o"].T
    x = x + (F.silu(rms(x) @ w["gate"].T) * (rms(x) @ w["up"].T)) @ w["down"].T
    assert torch.allclose(x, states[1], atol=1e-2)


def test_where_the_target_looks_is_told_in_slots(run: Run, answers: Answers, scale: Scale) -> None:
    attention = TeacherAttention(run.loaded, TAPS, top=3, device=CPU)
    entries = answers.entries[:2]
    batch = make_batch(answers, entries, scale)
    slots = attention.looked_at(batch, scale)
    rows, width = batch.answer.real.shape[1], batch.prompt.real.shape[1]
    assert slots.shape == (2, 2, rows, width + rows)
    for b, entry in enumerate(entries):
        states, count = answers.states(entry)[:3], entry.length - 2
        mask = torch.ones(count, count).tril().bool()
        wanted = torch.zeros(2, count, count, dtype=torch.bool)
        for i, layer in attention.layers.items():
            maps = attention.weights(layer, states[i : i + 1, :count], torch.arange(count)[None], mask)[0]
            best = maps.topk(3, dim=-1).indices
            chosen = torch.zeros_like(maps, dtype=torch.bool).scatter_(-1, best, True) & mask
            wanted |= chosen.unflatten(0, (2, 2)).any(1)
        start = width - (entry.prompt_length - 1)
        for row in range(entry.rows - 1):
            token = entry.prompt_length + row
            assert torch.equal(slots[b, :, row, start : start + token], wanted[:, token, 1 : token + 1])
        assert not slots[b, :, entry.rows - 1 :].any()


def test_alignment_counts_the_attention_on_what_is_wanted() -> None:
    weights = torch.tensor([[[[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]]]])
    wanted = torch.tensor([[[[True, False, True]]]])
    assert attention_alignment(weights, wanted) == pytest.approx(-(0.7 + 0.9) / 2)
    assert attention_alignment(weights, torch.zeros(1, 1, 1, 3, dtype=torch.bool)) == 0


def test_acceptance_is_counted_as_by_a_drafter(run: Run, answers: Answers, scale: Scale) -> None:
    head, teacher = make_head(run)
    entry = max(answers.entries, key=lambda e: e.rows)
    batch = make_batch(answers, [entry], scale)
    with torch.inference_mode():
        counts = acceptance.walk(right_steps(head, batch, teacher.embedding, depth=3))
        expected, row = [], 0
        while row < entry.rows:
            steps = stepwise(head, batch, teacher.embedding, row, min(3, entry.rows - row))
            drafted = [int(head.target_ids(step.logits[0, 0].argmax())) for step in steps]
            wanted = batch.targets[0, row : row + len(drafted)].tolist()
            wrong = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=True)) if a != b), len(drafted))
            expected.append(wrong)
            row += wrong + 1
    assert counts == expected
    assert sum(counts) + len(counts) >= entry.rows


def test_the_engine_accepts_what_was_simulated(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, count=12, temperature=0.0, epochs=40.0, holdout=2)
    run.all()
    answers, prompts = Answers(tmp_path / "answers"), {p.key: p for p in read_prompts(run.data)}
    held_out = answers.held_out(60)
    head, teacher = load_head(run.head_folder, SPEC), Teacher(run.loaded, range(8), CPU)
    plain = Scale([1.0] * len(TAPS), clamp=1e9)
    task = HeadTask(head, teacher, None, answers, plain, run.options, SPEC, CPU)
    simulated = acceptance.simulate(task, answers, held_out, SPEC.eos_token_ids, depth=4)
    exact = {**task.drafter(run.head_folder), "dtype": "float32"}  # as int8 it may fall on the other side of a tie
    measured = run.measure(exact, [prompts[entry.key] for entry in held_out])
    assert measured["all"].per_prompt == simulated["all"].per_prompt
    assert measured["all"].positions == simulated["all"].positions
    assert measured["all"].acceptance_length > 1.2


def test_walk_and_tally() -> None:
    right = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]], dtype=bool)
    assert acceptance.walk(right) == [2, 1]
    tally = acceptance.Tally()
    tally.add([2, 1])
    tally.add([0])
    assert tally.acceptance_length == 2.0
    assert tally.to_dict()["per_position"] == [round(2 / 3, 4), round(1 / 3, 4)]
    assert tally.to_dict()["conditional"] == [round(2 / 3, 4), 0.5]


def test_an_epoch_holds_every_sequence_once_in_batches_of_a_size() -> None:
    entries = [Entry(0, 0, 0, 10 + i % 37, 5, "chat", False, i) for i in range(200)]
    batches = plan_epoch(entries, tokens=120, seed=1, epoch=0)
    assert sorted(e.key for batch in batches for e in batch) == list(range(200))
    assert all(len(b) == 1 or len(b) * max(e.rows for e in b) <= 120 for b in batches)
    assert batches == plan_epoch(entries, tokens=120, seed=1, epoch=0)
    assert batches != plan_epoch(entries, tokens=120, seed=1, epoch=1)


def test_the_default_head_is_cheap() -> None:
    target = SHAPES["smollm2-135m"]
    spec = head_spec(target, DistillOptions())
    assert draft_weights(spec) / target_weights(target) < 0.06
    assert (spec.num_heads, spec.num_kv_heads, spec.max_positions) == (6, 3, 8192)
    stretched = head_spec(target, DistillOptions(yarn_factor=4.0))
    assert stretched.rope.kind == "yarn"


def test_a_student_of_all_layers_is_the_target(run: Run, answers: Answers) -> None:
    student = new_student(run.loaded, range(SPEC.num_layers), mlp_share=1.0, exit_only=True, seed=0).eval()
    teacher = Teacher(run.loaded, range(SPEC.vocab_size), CPU)
    tokens = [answers.tokens(entry)[:-1] for entry in answers.entries[:2]]
    hidden = student(torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), teacher.embedding)
    for i, entry in enumerate(answers.entries[:2]):
        logits = F.linear(hidden[i, : entry.length - 1], teacher.rows)
        assert torch.allclose(logits, teacher.logits(answers.states(entry)[-1]), atol=3e-2)


@pytest.mark.parametrize(("kind", "layers"), [("model", (0, 3)), ("early-exit", (0, 1))])
def test_the_engine_accepts_what_a_student_was_simulated_to_draft(tmp_path: Path, kind: str, layers: tuple) -> None:
    run = tiny_run(tmp_path, count=12, temperature=0.0, epochs=20.0, holdout=2, kind=kind, layers=layers, lr=1e-3)
    result = run.all()
    assert result.history[-1]["kl"] < result.history[0]["kl"]
    answers, prompts = Answers(tmp_path / "answers"), {p.key: p for p in read_prompts(run.data)}
    held_out = answers.held_out(60)
    drafter = {"name": "model", "path": str(run.head_folder), "dtype": "int8"}
    measured = run.measure(drafter, [prompts[entry.key] for entry in held_out])["all"].to_dict()
    assert measured["acceptance_length"] > 1.2
    assert measured["acceptance_length"] == pytest.approx(result.scores["all"]["acceptance_length"], abs=0.1)
    frozen = load_model(str(run.head_folder)).weights["layers.0.q"].dense()
    stored = torch.from_numpy(run.loaded.weights["layers.0.q"].dense()).bfloat16().float().numpy()
    assert np.array_equal(frozen, stored) == (kind == "early-exit")
