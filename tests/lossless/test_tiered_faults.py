"""Faults of the slow tier through the whole engine, and prompts that stay on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import outrider.memory.place.build as build
import tiering
from contexts import GREEDY, LONG
from faults import FaultyDisk
from outrider import LLM
from tiering import SPARSE, answers, check, mode, need, slow, start, tiers

folder, resident = tiering.folder, tiering.resident


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(folder, tmp_path, monkeypatch) -> Callable[..., tuple[LLM, FaultyDisk]]:
    """An engine over a disk that can misbehave."""
    monkeypatch.setattr(build, "DiskTier", FaultyDisk)

    def make(context: dict[str, Any], **options: Any) -> tuple[LLM, FaultyDisk]:
        llm = start(folder, slow(tmp_path, context), **options)
        return llm, llm.core.place.tier

    return make


def corrupt(llm: LLM, disk: FaultyDisk, share: float, seed: int = 0) -> int:
    """Change a byte in some of the blocks that are there."""
    llm.core.place.mover.drain()
    there = np.flatnonzero(disk._written)
    chosen = np.random.default_rng(seed).choice(there, max(1, int(share * len(there))), replace=False)
    for block in chosen:
        disk.flip(int(block))
    return len(chosen)


@pytest.mark.parametrize("name", ["full", "sparse"])
def test_a_corrupt_prefix_is_computed_again(faulty, resident, name) -> None:
    """A hit on pages that rotted on disk: noticed, computed again, the same tokens."""
    llm, disk = faulty(mode(name))
    with llm:
        assert answers(llm) == resident(mode(name))
        assert corrupt(llm, disk, 0.3) > 5
        assert answers(llm) == resident(mode(name))
        assert tiers(llm).lost_sequences > 0


def test_a_block_lost_while_decoding_is_computed_again(faulty, resident) -> None:
    """Everything that was computed is computed again; those whose KV is whole go on untouched."""
    llm, disk = faulty(mode("full"))
    with llm:
        stream = llm.stream(LONG[0], GREEDY)
        said = [next(stream) for _ in range(12)]
        corrupt(llm, disk, 1.0)
        said += list(stream)
        assert [token for piece in said for token in piece.token_ids] == resident(mode("full"))[0]
        assert tiers(llm).lost_sequences > 0
        check(llm)


def test_a_sparse_answer_goes_on_after_a_loss(faulty, resident) -> None:
    llm, disk = faulty({**SPARSE, "sticky": 0.0})
    with llm:
        stream = llm.stream(LONG[0], GREEDY)
        said = [next(stream) for _ in range(12)]
        corrupt(llm, disk, 1.0)
        said += list(stream)
        tokens = [token for piece in said for token in piece.token_ids]
        assert len(tokens) == 40
        assert said[-1].finish.reason == "length"
        assert tiers(llm).lost_sequences > 0
        check(llm)


def test_a_disk_that_cannot_be_read_ends_requests_and_not_the_engine(faulty, resident) -> None:
    llm, disk = faulty(mode("full"))
    with llm:
        disk.read_error = True
        outputs = llm.generate(LONG[:2], GREEDY)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
        assert "slow tier" in str(outputs[0].outputs[0].stop_reason)
        disk.read_error = False
        assert answers(llm) == resident(mode("full"))
        assert disk.hits > 0


def test_a_full_disk_ends_requests_with_a_clear_error(faulty, resident) -> None:
    llm, disk = faulty(mode("full"))
    with llm:
        answers(llm, LONG[2:3])
        disk.full_after = 0
        output = llm.generate(LONG[:1], GREEDY)[0].outputs[0]
        assert output.finish_reason == "error"
        assert "free space on that disk" in str(output.stop_reason)
        disk.full_after = None
        assert answers(llm) == resident(mode("full"))


def test_a_full_disk_at_the_first_layer(faulty, resident, folder, tmp_path) -> None:
    """The layer that could not go down stays; the request that needed the room ends, the next ones are served."""
    llm, disk = faulty({**mode("full"), "slow_layers": None}, max_num_batched_tokens=16)
    with llm:
        llm.set_context_config({**mode("full"), "kv_memory": need(folder, 140)})
        disk.full_after = 0
        outputs = llm.generate([LONG[2], LONG[3]], GREEDY)
        assert outputs[0].outputs[0].token_ids == resident(mode("full"))[2]
        assert outputs[1].outputs[0].finish_reason == "error"
        assert tiers(llm).slow_layers == 0
        disk.full_after = None
        assert answers(llm, [LONG[3]])[0] == resident(mode("full"))[3]
        assert tiers(llm).slow_layers > 0


@pytest.mark.parametrize("fault", ["short", "slow"])
def test_short_reads_and_slow_disks_change_nothing(faulty, resident, fault) -> None:
    llm, disk = faulty(mode("bounded"))
    with llm:
        disk.short, disk.delay = fault == "short", 0.0005 * (fault == "slow")
        assert answers(llm, params=replace(GREEDY, max_tokens=12)) == [a[:12] for a in resident(mode("bounded"))]
        assert fault == "slow" or disk.hits > 10
        assert tiers(llm).failures == 0
        if fault == "slow":
            assert tiers(llm).exposed_s > 0.01


# --- prompts that stay on disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 3])
def test_a_restart_finds_kept_prompts(folder, resident, tmp_path, layers) -> None:
    """With the same selections, in whatever tier they are put."""
    context = slow(tmp_path, SPARSE, 3, keep_prompts=50)
    with start(folder, context) as llm:
        assert answers(llm) == resident(SPARSE)
        assert llm.core.memory.prompts.written == 3
    with start(folder, slow(tmp_path, SPARSE, layers, keep_prompts=50)) as llm:
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == resident(SPARSE)
        assert [output.metrics.cached_tokens for output in outputs] == [88, 56, 0, 120]
        assert llm.core.memory.prompts.found == 3
        check(llm)
        answers(llm)
        assert llm.core.memory.prompts.found == 3, "the prefix cache has them"
        assert llm.core.memory.prompts.written == 0
    with start(folder, {**context, "keep_prompts": 8}, kv_cache_dtype="bfloat16") as llm:
        answers(llm)
        assert llm.core.memory.prompts.found == 0, "KV of another type is another prompt"


def test_a_damaged_prompt_is_computed_again(folder, resident, tmp_path) -> None:
    context = slow(tmp_path, SPARSE, keep_prompts=50)
    with start(folder, context) as llm:
        answers(llm)
    files = sorted(tmp_path.glob("outrider-prefix-*"))
    assert len(files) == 3
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data if number else data[: len(data) // 2])
    with start(folder, context) as llm:
        assert answers(llm) == resident(SPARSE)
        assert llm.core.memory.prompts.found == 0
        assert llm.core.memory.prompts.written == 3
    with start(folder, context) as llm:
        assert answers(llm) == resident(SPARSE)
        assert llm.core.memory.prompts.found == 3
