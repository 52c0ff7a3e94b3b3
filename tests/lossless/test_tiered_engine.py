"""Layers in the slow tier, through the whole engine on a tiny model: the tokens are those of resident KV.

K numbers are those of the known failures of sparse and tiered caches (docs/context.md). Every test proves that what
it is about has happened: bytes were loaded, layers moved, transfers were reordered, blocks were lost.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider.memory.place.build as build
from faults import FaultyDisk, LazyTransfer, ShuffledTransfer
from loading import LLAMA_CONFIG, llama_folder, llama_tensors
from outrider import LLM, SamplingParams
from outrider.errors import CapacityError, ConfigError, UnsupportedError

CONFIG = {**LLAMA_CONFIG, "num_hidden_layers": 4, "max_position_embeddings": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SPARSE = {"mode": "sparse", "budget": 24, "sinks": 2, "window": 4, "group": 2}
SEEDS = np.random.default_rng(5)
LONG = [SEEDS.integers(3, 320, length).tolist() for length in (90, 60, 33, 121)]
OPTIONS: dict[str, Any] = {
    "page_size": 4, "max_num_seqs": 4, "threads": 1, "dtype": "float32", "max_num_batched_tokens": 64,
    "backend": "compiled", "speculative_config": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tensors = {name: t * (0.1 if "proj" in name else 1.0) for name, t in llama_tensors(1, layers=4).items()}
    return str(llama_folder(tmp_path_factory.mktemp("tiers") / "model", tensors, CONFIG))


def start(folder: str, context: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM(folder, context_config=context, **{**OPTIONS, **options})


def answers(llm: LLM, prompts: list[list[int]] = LONG, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids of every sample; the engine is whole and idle afterwards."""
    outputs = llm.generate(prompts, params)
    check(llm)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def check(llm: LLM) -> None:
    """Nothing is held while idle, in any tier; every published page of a slow layer is in the tier."""
    llm.core.engine.check()
    place = llm.core.place
    place.mover.drain()
    place._drop_freed()
    place.mover.drain()
    assert not place.offload._sequences
    assert place.pages.in_flight == 0
    assert place.tier.held == place.slow_layers * len(llm.core.memory.pool.published) * place.pages.heads


def tiers(llm: LLM) -> Any:
    return llm.speculation_report().context.tiers


def slow(path: Path, context: dict[str, Any], layers: int | None = 3, **more: Any) -> dict[str, Any]:
    """A context config with so many slow layers."""
    return {**context, "kv_path": str(path), "kv_memory": 1 << 28, "slow_layers": layers, **more}


MODES = ["sparse", "bounded", "full", "lossless"]


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {**SPARSE, "mode": name, "full_every": 5, **more}


@pytest.fixture(scope="module")
def resident(folder: str) -> Callable[..., list[list[int]]]:
    """Answers of the engine that keeps all KV in memory, by context config and options; each is computed once."""
    known: dict[str, list[list[int]]] = {}

    def ask(context: dict[str, Any], params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
        key = repr((context, params, options))
        if key not in known:
            with start(folder, context, **options) as llm:
                outputs = llm.generate(LONG, params)
                known[key] = [sample.token_ids for output in outputs for sample in output.outputs]
        return known[key]

    return ask


# --- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("layers", [1, 4])
def test_slow_layers_change_no_token(folder, resident, tmp_path, name, layers) -> None:
    """Cold, a hit in the prefix cache, and together with others: bitwise resident KV (K13)."""
    expected = resident(mode(name))
    with start(folder, slow(tmp_path, mode(name), layers)) as llm:
        assert answers(llm) == expected
        outputs = llm.generate(LONG, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(output.metrics.cached_tokens > 0 for output in outputs)
        assert [answers(llm, [prompt])[0] for prompt in LONG] == expected
        report = tiers(llm)
        assert (report.slow_layers, report.moved_layers) == (layers, layers)
        assert report.loaded_bytes > 0 < report.stored_bytes
        assert report.failures == report.lost_sequences == 0


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_every_kv_type(folder, resident, tmp_path, kv, name) -> None:
    """K15."""
    with start(folder, slow(tmp_path, mode(name)), kv_cache_dtype=kv) as llm:
        assert answers(llm) == resident(mode(name), kv_cache_dtype=kv)
        assert tiers(llm).loaded_bytes > 0


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
def test_a_smaller_type_in_the_slow_tier_answers_too(folder, tmp_path, kv) -> None:
    context = slow(tmp_path, SPARSE, slow_kv_dtype="int8")
    with start(folder, context, kv_cache_dtype=kv) as llm:
        assert all(len(answer) == 40 for answer in answers(llm))
        place = llm.core.place
        assert place.tier.block_bytes < place._page_bytes // place.pages.heads


@pytest.mark.parametrize("make", [lambda: ShuffledTransfer(3), LazyTransfer], ids=["shuffled", "lazy"])
@pytest.mark.parametrize("name", ["sparse", "bounded", "full"])
def test_delays_and_reorderings_change_no_token(folder, resident, tmp_path, monkeypatch, make, name) -> None:
    """K10, K12: a copy that nobody waits for is noticed every time."""
    monkeypatch.setattr(build, "Transfer", make)
    with start(folder, slow(tmp_path, mode(name))) as llm:
        assert answers(llm) == resident(mode(name))
        assert answers(llm, params=replace(GREEDY, max_tokens=10)) == [a[:10] for a in resident(mode(name))]
        mover = llm.core.place.mover
        assert mover.account.loads > 20
        assert getattr(mover, "reordered", 1) > 0


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("elastic", [True, False])
def test_look_ahead_and_elastic_loading_change_bytes_and_no_token(folder, resident, tmp_path, ahead, elastic) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm)
        usual = tiers(llm).loaded_bytes
    with start(folder, slow(tmp_path, SPARSE, prefetch=ahead, elastic=elastic)) as llm:
        assert answers(llm) == resident(SPARSE)
        assert (tiers(llm).loaded_bytes > 1.5 * usual) == (not elastic)


def test_chunks_company_and_preemption_change_nothing(folder, resident, tmp_path) -> None:
    """K7, K23: prompts cut anywhere; a pool so small that sequences take what they have along and put it back."""
    for name in ("sparse", "bounded"):
        expected = resident(mode(name))
        with start(folder, slow(tmp_path, mode(name)), max_num_batched_tokens=9) as llm:
            assert answers(llm) == expected
        pages = -(-max(map(len, LONG)) // 4) + 11 + 24
        with start(folder, slow(tmp_path, mode(name))) as llm:
            per_page = llm.core.resolved.kv_bytes // llm.core.resolved.num_pages
        with start(folder, slow(tmp_path, mode(name)), kv_memory=pages * per_page, max_model_len=pages * 4) as llm:
            assert answers(llm) == expected
            assert llm.core.engine.scheduler.preemptions > 0


DRAFTERS: list[dict[str, Any]] = [
    {"drafters": ["ngram"], "num_speculative_tokens": 5},
    {"drafters": ["ngram", "suffix"], "vote": "hedge", "length": "goodput", "num_speculative_tokens": [0, 8]},
    {"drafters": ["suffix", "ngram"], "vote": "majority", "num_speculative_tokens": 4},
]


@pytest.mark.parametrize("speculation", DRAFTERS)
@pytest.mark.parametrize("name", ["sparse", "full"])
def test_speculation_over_slow_layers(folder, resident, tmp_path, speculation, name) -> None:
    """K19: rejected drafts leave nothing in buffers or tier; one load per verified block."""
    fixed = isinstance(speculation["num_speculative_tokens"], int)
    expected = resident(mode(name), speculative_config=speculation) if fixed else None
    with start(folder, slow(tmp_path, mode(name)), speculative_config=speculation) as llm:
        said = answers(llm)
        report = llm.speculation_report()
        assert report.num_draft_tokens > report.num_accepted_tokens > 0
        assert report.context.tiers.loaded_bytes > 0
    if name == "full":
        assert said == resident(mode("full"))
    elif expected is not None:
        assert said == expected


def test_the_pipelined_loop(folder, resident, tmp_path) -> None:
    config = {"drafters": ["ngram"], "num_speculative_tokens": 4, "pipeline": True}
    with start(folder, slow(tmp_path, mode("full")), speculative_config=config) as llm:
        assert answers(llm) == resident(mode("full"))
        assert llm.speculation_report().num_accepted_tokens > 0


def test_samples_share_their_prompt(folder, tmp_path) -> None:
    params = replace(GREEDY, temperature=1.0, seed=4, n=3)
    with start(folder, SPARSE) as llm:
        outputs = llm.generate(LONG[:1], params)
        expected = [sample.token_ids for sample in outputs[0].outputs]
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        assert answers(llm, LONG[:1], params) == expected
        assert len({tuple(sample) for sample in expected}) == 3


def test_an_abort_leaves_nothing_behind(folder, resident, tmp_path) -> None:
    with start(folder, slow(tmp_path, mode("bounded"))) as llm:
        for steps in (1, 2, 9):
            stream = llm.stream(LONG[3], GREEDY)
            for _ in range(steps):
                next(stream)
            stream.close()
            check(llm)
        assert answers(llm) == resident(mode("bounded"))


def test_a_budget_that_holds_the_context_is_full_attention(folder, resident, tmp_path) -> None:
    """K3, K16: over slow layers too, whether the buffers hold everything or it is staged."""
    with start(folder, slow(tmp_path, {**SPARSE, "budget": 200})) as llm:
        assert answers(llm) == resident(mode("full"))
        assert tiers(llm).slow_layers == 3


# --- layers that move, and the plan ----------------------------------------------------------------------------------


def need(folder: str, tokens: int) -> int:
    """Bytes of KV of so many tokens."""
    with start(folder) as llm:
        return tokens * llm.core.decoder.kv_bytes_per_token()


@pytest.mark.parametrize("name", ["sparse", "full"])
def test_layers_go_down_when_they_must_and_come_back(folder, resident, tmp_path, name) -> None:
    """Tokens stay, use stays below the limit at every step, and the plan is what is used."""
    expected = resident(mode(name))
    limit = need(folder, 330)
    context = {**mode(name), "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16, max_model_len=200) as llm:
        place, seen = llm.core.place, []
        step = llm.core.engine.step

        def watched() -> Any:
            deltas = step()
            plan = place.plan()
            seen.append((place.slow_layers, place.used(), plan.fast_bytes))
            return deltas

        llm.core.engine.step = watched  # type: ignore[method-assign]
        assert answers(llm) == expected
        assert max(slow for slow, _, _ in seen) > 0 == seen[0][0]
        assert max(used for _, used, _ in seen) <= limit
        assert all(used <= planned * 1.05 for _, used, planned in seen)
        assert tiers(llm).loaded_bytes > 0
        seen.clear()
        assert answers(llm, LONG[2:3], replace(GREEDY, max_tokens=80))[0][:40] == expected[2]
        assert seen[-1][0] == 0, "a short request alone has room; its layers come back"
        assert tiers(llm).moved_layers >= 2
        assert answers(llm) == expected


def test_the_last_layer_that_comes_back_leaves_no_staging(folder, resident, tmp_path) -> None:
    """Layers come back while requests run that need nearly all the room: what was staged goes first."""
    limit = need(folder, 400)
    context = {**mode("full"), "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16, max_model_len=200) as llm:
        place, seen = llm.core.place, []
        step = llm.core.engine.step

        def watched() -> Any:
            deltas = step()
            seen.append((place.slow_layers, place.used()))
            return deltas

        llm.core.engine.step = watched  # type: ignore[method-assign]
        assert answers(llm) == answers(llm) == resident(mode("full"))
        assert any(before > after == 0 for (before, _), (after, _) in pairwise(seen))
        assert max(used for _, used in seen) <= limit


def test_nothing_moves_while_everything_fits(folder, resident, tmp_path) -> None:
    context = {**SPARSE, "kv_path": str(tmp_path), "kv_memory": 1 << 28}
    with start(folder, context) as llm:
        assert answers(llm) == resident(SPARSE)
        assert (tiers(llm).moved_layers, tiers(llm).loaded_bytes, tiers(llm).stored_bytes) == (0, 0, 0)
        assert llm.core.place.tier.held == 0


def test_admission_waits_for_the_plan(folder, resident, tmp_path) -> None:
    """More requests than the buffers have room for: they come one after the other."""
    limit = need(folder, 150)
    context = {**SPARSE, "kv_path": str(tmp_path), "kv_memory": limit}
    with start(folder, context, max_num_batched_tokens=16) as llm:
        place, most = llm.core.place, 0
        step = llm.core.engine.step

        def watched() -> Any:
            nonlocal most
            deltas = step()
            most = max(most, len(llm.core.engine.scheduler.running))
            assert place.used() <= limit
            return deltas

        llm.core.engine.step = watched  # type: ignore[method-assign]
        assert answers(llm) == resident(SPARSE)
        assert 1 <= most < 4
        assert tiers(llm).slow_layers > 0


def test_what_can_never_fit_is_refused(folder, tmp_path) -> None:
    """K33: by name at the start, or the context is lowered and a longer prompt refused."""
    context = {**SPARSE, "kv_path": str(tmp_path)}
    with pytest.raises(CapacityError, match="buffers of one request"):
        start(folder, {**context, "kv_memory": 1000})
    small = {**context, "kv_memory": need(folder, 150)}
    with pytest.raises(CapacityError, match="less than max_model_len = 512"):
        start(folder, {**small, "slow_layers": 0}, max_model_len=512)
    with start(folder, {**small, "slow_layers": 0}) as llm:
        assert 100 < llm.core.resolved.max_model_len < 160


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({**SPARSE, "kv_memory": 1 << 20}, "kv_memory needs kv_path"),
        ({**SPARSE, "window": 3, "kv_path": "here"}, "use 4 or more"),
        ({**SPARSE, "kv_path": "/proc/nowhere"}, "cannot be used"),
        ({**SPARSE, "kv_path": "here", "slow_kv_dtype": "bfloat16", "kv": "int8"}, "cannot be kept as bfloat16"),
        ({**SPARSE, "kv_path": "here", "backend": "reference"}, "reference decoder"),
        ({**SPARSE, "keep_prompts": 10}, "keep_prompts needs kv_path"),
        ({**SPARSE, "slow_layers": 2}, "slow_layers needs kv_path"),
        ({**SPARSE, "slow_kv_dtype": "int8"}, "slow_kv_dtype needs kv_path"),
        ({**SPARSE, "prefetch": 0}, "prefetch needs kv_path"),
        ({**SPARSE, "elastic": False}, "elastic needs kv_path"),
        ({**SPARSE, "kv_path": ""}, "name a folder"),
        ({**SPARSE, "kv_path": "a\0b"}, "name a folder"),
        ({**SPARSE, "kv_path": "here", "slow_layers": 5}, "use 0 to 4"),
        ({**SPARSE, "min_captured": 1.1}, "from 0 to 1"),
        ({**SPARSE, "min_captured": float("nan")}, "from 0 to 1"),
        ({**SPARSE, "sticky": float("nan")}, "use 0 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(folder, tmp_path, context, words) -> None:
    """K34."""
    context = dict(context)
    options = {name: context.pop(name) for name in ("backend",) if name in context}
    if "kv" in context:
        options["kv_cache_dtype"] = context.pop("kv")
    if context.get("kv_path") == "here":
        context["kv_path"] = str(tmp_path)
    with pytest.raises(ConfigError, match=words):
        start(folder, context, **options)


def test_sliding_windows_are_refused(tmp_path) -> None:
    from outrider.config import ContextConfig
    from outrider.memory.place.build import check_tiers
    from outrider.memory.shapes import SHAPES

    spec = replace(SHAPES["mistral-7b"], sliding_window=4096)
    with pytest.raises(ConfigError, match="sliding window"):
        check_tiers(ContextConfig(kv_path=str(tmp_path)), spec, 16)


def test_a_requests_budget_is_what_the_buffers_hold(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        with pytest.raises(UnsupportedError, match="use 24 or less"):
            llm.generate(LONG[:1], replace(GREEDY, extra_args={"context_budget": 25}))
        smaller = llm.generate(LONG[:1], replace(GREEDY, extra_args={"context_budget": 16}))[0]
        assert smaller.metrics.context.budget == 16


def test_the_way_of_reading_can_be_changed_while_idle(folder, resident, tmp_path) -> None:
    """Cached prompts stay, in the tier too; limits move layers."""
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        for context in (SPARSE, mode("full"), {**SPARSE, "group": 1, "budget": 32}, mode("lossless")):
            llm.set_context_config({**context, "slow_layers": 2})
            outputs = llm.generate(LONG, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == resident(context)
            assert tiers(llm).slow_layers == 2
        assert all(output.metrics.cached_tokens > 0 for output in outputs)
        llm.set_context_config({**SPARSE, "slow_layers": 0})
        assert answers(llm) == resident(SPARSE)
        assert tiers(llm).slow_layers == 0
        with pytest.raises(ConfigError, match="make a new LLM"):
            llm.set_context_config({**SPARSE, "kv_path": str(tmp_path / "elsewhere")})


def test_a_refused_way_of_reading_leaves_the_old_one(folder, resident, tmp_path) -> None:
    """What a start would refuse, and what only a start can give."""
    refused = {
        "use 0 to 4": {"slow_layers": 99},
        "cannot hold the buffers of one request": {"kv_memory": 1},
        "this machine has": {"kv_memory": 10**18},
        "kv_path cannot be changed": {"kv_path": "/proc/nowhere"},
        "slow_kv_dtype cannot be changed": {"slow_kv_dtype": "int8"},
        "keep_prompts cannot be changed": {"keep_prompts": 5},
    }
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        rules = llm.core.place.rules
        for words, change in refused.items():
            with pytest.raises((CapacityError, ConfigError), match=words):
                llm.set_context_config({**SPARSE, **change})
            assert llm.core.place.rules == rules
        assert answers(llm) == resident(SPARSE)
        assert tiers(llm).slow_layers == 3


def test_buffers_are_no_longer_than_a_context(folder, resident, tmp_path) -> None:
    """A budget beyond every context takes no memory that nobody can use."""
    with start(folder, slow(tmp_path, {**SPARSE, "budget": 10**12})) as llm:
        assert llm.core.place.shape.capacity == 512 + 4
        assert answers(llm) == resident(mode("full"))
        assert answers(llm) == resident(mode("full"))
        assert tiers(llm).loaded_bytes > 0, "a hit reads what the cold run wrote"


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
    """K13, K18: with the same selections, in whatever tier they are put."""
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


# --- what is told ----------------------------------------------------------------------------------------------------


def test_every_report_says_what_moved(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        output = llm.generate(LONG[:1], GREEDY)[0]
        seen, report = output.metrics.context, tiers(llm)
        assert 0 < seen.loaded_bytes <= report.loaded_bytes
        assert 0 < seen.stored_bytes <= report.stored_bytes
        assert seen.exposed_wait_s >= 0
        assert output.to_dict()["context"]["loaded_bytes"] == seen.loaded_bytes
        assert "moved" in seen.line()
        plan = llm.memory_plan()
        assert plan["slow_layers"] == 3
        assert plan["kv_slow"] > 0
        assert plan["kv_limit"] == 1 << 28
        assert plan["kv_fast"] <= plan["kv_planned"] * 1.05


def test_the_file_disappears(folder, tmp_path) -> None:
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm, LONG[:1])
        assert list(tmp_path.glob("outrider-kv-*"))
    gc.collect()
    assert not list(tmp_path.glob("outrider-kv-*"))


def test_the_benchmark_compares_placements(folder, tmp_path) -> None:
    """One table for the ablation, and pictures of what moved."""
    from outrider.bench.context import draw, make_prompts, measure_cells, parse_share, parse_ways
    from outrider.bench.timeline import Timeline

    names = ["resident", "offloaded", "elastic", "tiered", "reread"]
    limit = parse_share("80%", need(folder, 3 * 240))
    assert limit == int(0.8 * need(folder, 720))
    with pytest.raises(ConfigError, match="share like 25%"):
        parse_share("most", 1000)
    with pytest.raises(ConfigError, match="needs a slow tier"):
        parse_ways(["tiered"], [90])
    with start(folder, {"kv_path": str(tmp_path)}, max_num_batched_tokens=16) as llm:
        prompts = make_prompts(llm, None, 3, 220)
        ways = parse_ways(names, [69], limit)
        cells = measure_cells(llm, ways, prompts, 16, 1)
        rows = {cell.way.name: cell.row(cells[0], 220) for cell in cells}
        draw(llm, cells, prompts, tmp_path / "pictures")
        llm.set_context_config(ways[3].config(4))
        with Timeline(llm) as timeline:
            llm.generate(prompts, replace(GREEDY, max_tokens=12))
        events = timeline.last_step()
    assert all(row["identical"] for row in rows.values())
    assert [rows[name]["slow_layers"] for name in names[:3]] == [0, 4, 4]
    assert 0 < rows["tiered"]["slow_layers"] < 4
    assert rows["resident"]["moved_bytes"] == 0 < rows["tiered"]["moved_bytes"]
    assert rows["elastic"]["moved_bytes"] < rows["offloaded"]["moved_bytes"]
    assert rows["tiered"]["moved_bytes"] < rows["reread"]["moved_bytes"]
    assert rows["tiered"]["resident_bytes"] <= limit
    assert {kind for kind, *_ in events} == {"load", "compute"}
    assert all(start < stop for _, _, start, stop in events)
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"moved.png", "timeline.png"}


def test_the_plan_is_told_at_the_start(folder, tmp_path, caplog) -> None:
    with caplog.at_level("INFO"), start(folder, {**SPARSE, "kv_path": str(tmp_path), "kv_memory": 500_000}) as llm:
        assert "in kv_path" in caplog.text
        assert llm.describe()["memory_plan"].startswith("KV in 500000 bytes of fast memory: requests: 1 of ")
    with start(folder) as llm:
        assert llm.describe()["memory_plan"] == "all KV stays in fast memory"


def test_a_killed_process_leaves_a_file_that_the_next_start_removes(folder, tmp_path) -> None:
    """Killed while pages were being written."""
    code = (
        "import os, signal, sys\n"
        "from outrider import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, context_config={slow(tmp_path, SPARSE)!r}, **{OPTIONS!r})\n"
        f"stream = llm.stream({LONG[0]!r}, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))\n"
        "next(stream)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    left = list(tmp_path.glob("outrider-kv-*"))
    assert len(left) == 1
    with start(folder, slow(tmp_path, SPARSE)) as llm:
        answers(llm, LONG[:1])
        assert not left[0].exists()


@pytest.mark.model
def test_on_the_default_model(tmp_path) -> None:
    """A quarter of the KV in memory: the same tokens, and use that the plan foretold."""
    rng = np.random.default_rng(0)
    text = " ".join(f"House {i} has a {['red', 'green', 'blue'][int(rng.integers(3))]} lamp." for i in range(110))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 1152, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    context: dict[str, Any] = {"mode": "sparse", "budget": 128}
    with LLM("smollm2-135m", context_config=context, speculative_config=None, **options) as llm:
        expected = llm.generate(text, params)[0].outputs[0].token_ids
        limit = 320 * llm.core.decoder.kv_bytes_per_token()
    tiered = {**context, "kv_memory": limit, "kv_path": str(tmp_path)}
    with LLM("smollm2-135m", context_config=tiered, speculative_config=None, **options) as llm:
        output = llm.generate(text, params)[0]
        assert output.outputs[0].token_ids == expected
        assert output.metrics.context.loaded_bytes > 0
        assert tiers(llm).slow_layers > 20
        plan = llm.memory_plan()
        assert plan["kv_fast"] <= plan["kv_planned"] * 1.05 <= limit * 1.05
