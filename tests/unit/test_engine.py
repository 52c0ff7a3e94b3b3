"""The loop on a scripted target: batching, chunking, sharing, preemption, aborts, stops, limits, features."""

from __future__ import annotations

import pytest

from harness import GREEDY, Harness
from outrider.types import SamplingParams
from scripted import next_token, plain, walk, whole_prefix
from scripted_drafters import ConstantDrafter, DeadDrafter, HalfOracleDrafter, JunkDrafter, OracleDrafter, TreeDrafter

SCRIPT = whole_prefix()
PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
EXPECTED = [plain(SCRIPT, prompt, 24) for prompt in PROMPTS]
KINDS = [OracleDrafter, HalfOracleDrafter, JunkDrafter, TreeDrafter, DeadDrafter]


def test_plain_decoding_is_the_loop_with_a_null_object() -> None:
    harness = Harness(SCRIPT)
    assert harness.run(PROMPTS) == EXPECTED
    assert harness.drafted == 0


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 8])
def test_speculation_changes_no_token(kind, depth, together) -> None:
    drafter = kind(SCRIPT)
    harness = Harness(SCRIPT, drafter, depth=depth, max_num_seqs=together)
    assert harness.run(PROMPTS) == EXPECTED
    if drafter.name == "oracle":
        assert harness.drafted == harness.accepted > 0
    if drafter.name == "half-oracle" and depth > 2:
        assert harness.drafted > harness.accepted > 0
    if drafter.name == "tree" and depth > 1:
        assert harness.drafted > harness.accepted > 0
    if drafter.name == "junk":
        assert harness.drafted > harness.accepted == 0
    assert not drafter.held


def test_drafts_leave_a_row_for_everybody_behind() -> None:
    harness = Harness(SCRIPT, OracleDrafter(SCRIPT), depth=8, max_num_batched_tokens=6, prefix_caching=False)
    ids = [harness.submit([first, 2], SamplingParams(temperature=0, max_tokens=60)) for first in (1, 2, 3, 4)]
    for _ in range(8):
        harness.step()
    assert harness.accepted > 0
    assert all(len(harness.tokens(request_id)) >= 4 for request_id in ids)


def test_an_oracle_saves_forward_passes() -> None:
    fast, slow = Harness(SCRIPT, OracleDrafter(SCRIPT), depth=5), Harness(SCRIPT)
    fast.run(PROMPTS[:1])
    slow.run(PROMPTS[:1])
    assert fast.decoder.calls * 4 < slow.decoder.calls


@pytest.mark.parametrize("rows", [1, 3, 7, 512])
def test_chunks_of_a_prompt_change_nothing(rows) -> None:
    harness = Harness(SCRIPT, HalfOracleDrafter(SCRIPT), max_num_batched_tokens=rows)
    assert harness.run(PROMPTS) == EXPECTED


def test_a_second_turn_reuses_the_full_pages_of_the_first() -> None:
    harness = Harness(SCRIPT, HalfOracleDrafter(SCRIPT))
    prompt = list(range(1, 18))
    (answer,) = harness.run([prompt])
    turn = [*prompt, *answer, 30, 31]
    harness.deltas.clear()
    (second,) = harness.run([turn])
    assert second == plain(SCRIPT, turn, 24)
    committed = len(prompt) + len(answer) - 1  # the last token was told, but never computed
    assert harness.deltas[0].cached_tokens == committed // 4 * 4


def test_prefix_caching_can_be_off() -> None:
    harness = Harness(SCRIPT, prefix_caching=False)
    harness.run([PROMPTS[3]])
    harness.deltas.clear()
    assert harness.run([PROMPTS[3]]) == [EXPECTED[3]]
    assert harness.deltas[0].cached_tokens == 0


@pytest.mark.parametrize("drafter", [None, HalfOracleDrafter(SCRIPT), OracleDrafter(SCRIPT)])
def test_preemption_recomputes_to_the_same_tokens(drafter) -> None:
    harness = Harness(SCRIPT, drafter, pages=14, max_num_seqs=8)
    assert harness.run(PROMPTS) == EXPECTED
    assert harness.engine.scheduler.preemptions > 0


def test_drafts_never_cost_a_sequence_its_place() -> None:
    """Pages for four plain sequences, but not for their drafts: nobody is preempted for a guess."""
    prompts = [[n, n, n] for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=4)
    plainly = Harness(SCRIPT, pages=8)
    plainly.run(prompts, params)
    guessed = Harness(SCRIPT, OracleDrafter(SCRIPT), depth=8, pages=8)
    assert guessed.run(prompts, params) == [plain(SCRIPT, p, 4) for p in prompts]
    assert plainly.engine.scheduler.preemptions == guessed.engine.scheduler.preemptions == 0


def test_abort_in_every_phase_releases_everything() -> None:
    for steps in range(12):
        drafter = HalfOracleDrafter(SCRIPT)
        harness = Harness(SCRIPT, drafter, max_num_batched_tokens=4)
        ids = [harness.submit(prompt) for prompt in PROMPTS]
        for _ in range(steps):
            harness.step()
        for request_id in ids:
            harness.abort(request_id)
        harness.engine.check()
        assert not drafter.held
        assert not harness.engine.scheduler.busy
        assert all(len(harness.finishes(i)) == 1 for i in ids)


def test_abort_leaves_the_neighbours_alone() -> None:
    harness = Harness(SCRIPT, HalfOracleDrafter(SCRIPT))
    ids = [harness.submit(prompt) for prompt in PROMPTS]
    harness.step()
    harness.step()
    harness.abort(ids[1])
    harness.drain()
    assert [harness.tokens(i) for i in (ids[0], *ids[2:])] == [EXPECTED[0], *EXPECTED[2:]]
    assert harness.finishes(ids[1]) == ["abort"]


@pytest.mark.parametrize("limit", range(1, 11))
@pytest.mark.parametrize("depth", range(1, 9))
def test_usage_counts_delivered_tokens_only(limit, depth) -> None:
    harness = Harness(SCRIPT, OracleDrafter(SCRIPT), depth=depth)
    request = harness.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=limit))
    harness.drain()
    assert harness.tokens(request) == EXPECTED[0][:limit]
    assert harness.finishes(request) == ["length"]


@pytest.mark.parametrize("place", range(10))
def test_an_accepted_end_token_ends_exactly_there(place) -> None:
    script = walk(avoid=[49])
    ending = lambda prefix: 49 if len(prefix) == 3 + place else script(prefix)  # noqa: E731
    harness = Harness(ending, OracleDrafter(ending), depth=5, eos=[49])
    request = harness.submit([1, 2, 3])
    harness.drain()
    assert harness.tokens(request) == plain(ending, [1, 2, 3], place + 1)
    assert harness.finishes(request) == ["stop"]


def test_a_rejected_end_token_ends_nothing() -> None:
    script = walk(avoid=[49])
    harness = Harness(script, ConstantDrafter(script, token=49), eos=[49])
    request = harness.submit([1, 2, 3])
    harness.drain()
    assert harness.drafted > 0
    assert harness.tokens(request) == plain(script, [1, 2, 3], 24)
    assert harness.finishes(request) == ["length"]


def test_speculation_is_switched_per_request() -> None:
    harness = Harness(SCRIPT, HalfOracleDrafter(SCRIPT))
    off = harness.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, extra_args={"speculative": False}))
    on = harness.submit(PROMPTS[1])
    harness.drain()
    drafted = {i: sum(d.drafted for d in harness.deltas if d.request_id == i) for i in (off, on)}
    assert drafted[off] == 0 < drafted[on]
    assert [harness.tokens(off), harness.tokens(on)] == EXPECTED[:2]


def test_samples_of_a_request_share_its_prompt() -> None:
    harness = Harness(SCRIPT, OracleDrafter(SCRIPT))
    prompt = list(range(1, 18))
    request = harness.submit(prompt, SamplingParams(temperature=0, max_tokens=8, n=4))
    harness.drain()
    assert [harness.tokens(request, i) for i in range(4)] == [plain(SCRIPT, prompt, 8)] * 4
    assert [d.cached_tokens for d in harness.deltas if d.finish] == [0, 16, 16, 16]


def test_features_belong_to_the_tokens_that_were_committed() -> None:
    drafter = TreeDrafter(SCRIPT)
    harness = Harness(SCRIPT, drafter, depth=6, taps=(0,), max_num_batched_tokens=5)
    harness.run(PROMPTS)
    assert any(o.verdict.accepted for o in drafter.observed)
    for seen in drafter.observed:
        assert seen.features is not None
        assert seen.features[0, :, 0].tolist() == list(seen.tokens)
        assert seen.features[0, :, 1].tolist() == list(range(seen.start, seen.start + len(seen.tokens)))


def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunks() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    for rows in (2, 5, 512):
        harness = Harness(SCRIPT, HalfOracleDrafter(SCRIPT), max_num_batched_tokens=rows)
        request = harness.submit(PROMPTS[3], params)
        harness.drain()
        told = [d.prompt_logprobs for d in harness.deltas if d.prompt_logprobs]
        assert len(told) == 1
        assert told[0][0] is None
        assert [entry.token for entry in told[0][1:]] == PROMPTS[3][1:]
        best = [entry.top[0][0] for entry in told[0][1:]]
        assert best == [next_token(SCRIPT, PROMPTS[3][: i + 1]) for i in range(len(PROMPTS[3]) - 1)]
        assert harness.tokens(request) == EXPECTED[3][:3]


def test_a_request_that_cannot_be_sampled_ends_alone() -> None:
    class Broken:
        needs_logits = True
        vocab_size = 50
        params = GREEDY
        greedy = True

        def pick(self, logits, output):
            raise RuntimeError("scripted failure")

    harness = Harness(SCRIPT)
    bad = harness.submit(PROMPTS[0])
    harness.engine.scheduler.waiting[0].sampler = Broken()
    good = harness.submit(PROMPTS[1])
    harness.drain()
    assert harness.finishes(bad) == ["error"]
    assert harness.tokens(good) == EXPECTED[1]


def test_timings_cover_every_step() -> None:
    harness = Harness(SCRIPT, OracleDrafter(SCRIPT))
    harness.run(PROMPTS)
    timings = harness.speculator.timings
    assert len(timings) == harness.engine.steps > 0
    assert all(t.verify_s > 0 and t.rows > 0 and t.sequences > 0 for t in timings)
    assert sum(t.rows for t in timings) == harness.decoder.rows
