"""`judge` on chains and trees: what is accepted, where a text ends, and what is told about its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from judging import plain_text, row, rows, sampler_for, speculate, stopper_for
from outrider.types import Draft, Finish, SamplingParams
from outrider.verify import Rows, judge
from scripted import cycle, plain, random_logits, walk

V = 50
EOS = V - 1
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SCRIPT = walk(V, avoid=[EOS])
PROMPT = [1, 2]


def one_step(draft: Draft, params: SamplingParams = GREEDY, script=SCRIPT):
    stopper = stopper_for(params, V)
    return judge(draft, rows(script, PROMPT, draft, V), sampler_for(params, PROMPT), stopper, [])


def truth(count: int, script=SCRIPT) -> tuple[int, ...]:
    return tuple(plain(script, PROMPT, count))


@pytest.mark.parametrize("right", range(6))
def test_a_chain_is_accepted_up_to_its_first_wrong_token(right: int) -> None:
    g = truth(6)
    tokens = (*g[:right], *((token + 1) % V for token in g[right:5]))
    verdict = one_step(Draft(tokens, drafter="half"))
    assert verdict.tokens == g[: right + 1]
    assert verdict.accepted == tuple(range(right))
    assert (verdict.drafted, verdict.drafter, verdict.finish) == (5, "half", None)


def test_an_empty_draft_is_plain_decoding() -> None:
    assert one_step(Draft()).tokens == truth(1)


def test_a_tree_is_followed_along_the_branch_that_the_target_takes() -> None:
    g = truth(4)
    wrong = tuple((token + 1) % V for token in g)
    draft = Draft((wrong[0], g[0], g[1], wrong[1], g[1], wrong[2], g[2]), parents=(-1, -1, 0, 1, 1, 4, 4))
    verdict = one_step(draft)
    assert verdict.accepted == (1, 4, 6)
    assert verdict.tokens == g[:4]


def test_greedy_needs_only_the_best_tokens() -> None:
    g = truth(3)
    draft = Draft(g[:2])
    sampler = sampler_for(GREEDY, PROMPT)
    assert not sampler.needs_logits
    best = rows(SCRIPT, PROMPT, draft, V).best
    assert judge(draft, Rows(best), sampler, stopper_for(GREEDY, V), []).tokens == g


def test_greedy_with_probabilities_is_greedy() -> None:
    g = truth(3)
    probs = np.full((2, V), 1 / V)
    assert one_step(Draft(g[:2], probs=probs)).tokens == g
    assert one_step(Draft((g[0], (g[1] + 1) % V), probs=probs)).tokens == g[:2]


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
@pytest.mark.parametrize("j", range(9))
def test_an_accepted_end_token_ends_the_text_there(j: int, depth: int) -> None:
    base = walk(V, avoid=[EOS])
    script = lambda prefix: EOS if len(prefix) - len(PROMPT) == j else base(prefix)  # noqa: E731
    params = replace(GREEDY, max_tokens=30)

    def oracle(known: list[int]) -> Draft:
        return Draft(tuple(plain(script, known, depth)))

    spoken = speculate(script, PROMPT, sampler_for(params, PROMPT), stopper_for(params, V), oracle)
    assert spoken.tokens == plain(script, PROMPT, j + 1)
    assert spoken.finish == Finish("stop")
    assert spoken.accepted > 0


def test_a_rejected_end_token_does_not_end_the_text() -> None:
    params = replace(GREEDY, max_tokens=12)
    spoken = speculate(
        SCRIPT, PROMPT, sampler_for(params, PROMPT), stopper_for(params, V), lambda known: Draft((EOS,) * 4)
    )
    assert (spoken.tokens, spoken.finish) == (list(truth(12)), Finish("length"))
    assert spoken.accepted == 0 < spoken.corrected


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("limit", range(1, 11))
def test_no_token_is_counted_beyond_max_tokens(limit: int, depth: int) -> None:
    params = replace(GREEDY, max_tokens=limit)
    spoken = speculate(
        SCRIPT,
        PROMPT,
        sampler_for(params, PROMPT),
        stopper_for(params, V),
        lambda known: Draft(tuple(plain(SCRIPT, known, depth))),
    )
    assert spoken.tokens == list(truth(limit))
    assert sum(len(verdict.tokens) for verdict in spoken.verdicts) == limit
    assert all(len(v.accepted) <= len(v.tokens) <= len(v.accepted) + 1 for v in spoken.verdicts)


def test_a_stop_string_inside_an_accepted_run_ends_tokens_and_logprobs_there() -> None:
    script = cycle([0, 1, 2, 3, 4])
    params = replace(GREEDY, stop="bcd", logprobs=0)
    g = plain(script, [0], 5)
    draft = Draft(tuple(g))
    verdict = judge(draft, rows(script, [0], draft, V), sampler_for(params, [0]), stopper_for(params, V), [])
    assert verdict.tokens == (1, 2, 3)
    assert verdict.finish == Finish("stop", "bcd")
    assert len(verdict.logprobs) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_raw_log_softmax(temperature: float) -> None:
    """For accepted, corrected and bonus tokens, whatever penalties and bias do to the sampling."""
    script = random_logits(V, seed=3)
    params = SamplingParams(
        temperature=temperature, max_tokens=40, logprobs=3, repetition_penalty=1.4, logit_bias={4: 2.0}, ignore_eos=True
    )
    wanted, _ = plain_text(script, PROMPT, sampler_for(params, PROMPT), stopper_for(params, V))

    def half(known: list[int]) -> Draft:
        done = len(known) - len(PROMPT)
        tail = wanted[done : done + 3]
        return Draft(tuple(tail) if done % 2 else (*tail[:2], (wanted[min(done + 2, 39)] + 1) % V))

    spoken = speculate(script, PROMPT, sampler_for(params, PROMPT), stopper_for(params, V), half)
    told = [entry for verdict in spoken.verdicts for entry in verdict.logprobs]
    assert spoken.tokens == wanted
    assert [entry.token for entry in told] == wanted
    assert spoken.accepted > 0 < spoken.corrected
    for i, entry in enumerate(told):
        logits = row(script, [*PROMPT, *wanted[:i]], V).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-expected, kind="stable")
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-9)
        assert order[entry.rank - 1] == entry.token
        assert [token for token, _ in entry.top] == order[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[order[:3]], abs=1e-9)


def test_padding_of_the_head_is_never_emitted_nor_listed() -> None:
    logits = np.zeros((3, 48), np.float32)
    logits[:, 44] = 9.0
    logits[:, 7] = 5.0
    for params in (GREEDY, replace(GREEDY, temperature=1.0, logprobs=5)):
        sampler = sampler_for(params, PROMPT, 40)
        draft = Draft((44, 44))
        verdict = judge(draft, Rows(logits.argmax(axis=1), logits), sampler, stopper_for(params, 40), [])
        assert verdict.accepted == ()
        assert verdict.tokens[0] < 40
        assert all(token < 40 for entry in verdict.logprobs for token, _ in entry.top)


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_min_tokens_counts_tokens_and_not_steps(depth: int) -> None:
    """An impatient target: the end token is its favourite everywhere."""
    favourite = np.zeros(V, np.float32)
    favourite[EOS], favourite[3] = 9.0, 5.0
    params = replace(GREEDY, min_tokens=4)
    spoken = speculate(
        lambda prefix: favourite,
        PROMPT,
        sampler_for(params, PROMPT),
        stopper_for(params, V),
        lambda known: Draft((3,) * depth),
    )
    assert spoken.tokens == [3, 3, 3, 3, EOS]
    assert spoken.finish == Finish("stop")


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_a_penalty_turns_at_the_same_use_for_every_depth(depth: int) -> None:
    """A at 5.0 loses 1.0 per use and falls below B at 2.5 after three uses."""
    logits = np.full(V, -9.0, np.float32)
    logits[0], logits[1] = 5.0, 2.5
    params = replace(GREEDY, frequency_penalty=1.0, max_tokens=20)
    spoken = speculate(
        lambda prefix: logits,
        PROMPT,
        sampler_for(params, PROMPT),
        stopper_for(params, V),
        lambda known: Draft((0,) * depth if len(known) > len(PROMPT) else ()),
    )
    assert spoken.tokens[:4] == [0, 0, 0, 1]
    assert spoken.accepted > 0 < spoken.corrected


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_penalties_of_either_sign_are_the_same_as_without_drafts(depth: int) -> None:
    script = random_logits(V, seed=5)
    texts = {}
    for penalty in (2.0, -2.0):
        params = replace(GREEDY, frequency_penalty=penalty, ignore_eos=True)
        sampler, stopper = sampler_for(params, PROMPT), stopper_for(params, V)
        wanted, _ = plain_text(script, PROMPT, sampler, stopper)
        half = lambda known, w=wanted: Draft((*w[len(known) - 2 :][: depth // 2 + 1], 0))  # noqa: E731
        spoken = speculate(script, PROMPT, sampler_for(params, PROMPT), stopper, half)
        assert spoken.tokens == wanted
        assert spoken.accepted > 0 < spoken.corrected
        texts[penalty] = wanted
    assert texts[2.0] != texts[-2.0]


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_a_biased_token_appears_at_no_position(depth: int) -> None:
    script = cycle([3, 4, 5, 6, 7, 8, 9])
    hated = plain(script, PROMPT, 3)[2]
    params = replace(GREEDY, logit_bias={hated: -100.0}, max_tokens=40)
    wanted, _ = plain_text(script, PROMPT, sampler_for(params, PROMPT), stopper_for(params, V))
    spoken = speculate(
        script,
        PROMPT,
        sampler_for(params, PROMPT),
        stopper_for(params, V),
        lambda known: Draft(tuple(plain(script, known, depth))),
    )
    assert spoken.tokens == wanted
    assert hated not in spoken.tokens
    assert spoken.accepted > 0 < spoken.corrected
