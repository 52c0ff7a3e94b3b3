"""Sampler: its law by chi-square, its seeds, and each parameter's meaning."""

from __future__ import annotations

from collections import Counter
from time import thread_time

import numpy as np
import pytest

from judging import sampler_for
from outrider.errors import UnsupportedError
from outrider.sampling import Sampler
from outrider.types import Float32, SamplingParams

V = 6
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
#: Chi-square limit for 5 degrees of freedom at p = 1e-4; the draws are fixed, so this never flickers.
LIMIT = 25.7


def softmax(logits: Float32) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def chi_square(counts: Counter, p: np.ndarray) -> float:
    draws = sum(counts.values())
    return sum((counts[token] - draws * p[token]) ** 2 / (draws * p[token]) for token in range(len(p)) if p[token] > 0)


@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_choices_follow_p_over_positions_seeds_and_samples(vary: str) -> None:
    params = SamplingParams(temperature=0.8, top_k=4)
    fixed = sampler_for(params, vocab_size=V, seed=11)
    p = fixed.distribution(LOGITS, [])
    draws = 6000
    if vary == "position":
        counts = Counter(fixed.choose(p, position) for position in range(draws))
    else:
        samplers = (sampler_for(params, vocab_size=V, **{"seed": 3, vary: value}) for value in range(draws))
        counts = Counter(sampler.choose(p, 5) for sampler in samplers)
    assert chi_square(counts, p) < LIMIT
    assert set(counts) == {0, 1, 2, 3}, "mass outside the support"


def test_flips_and_redraws_follow_their_law_and_ignore_the_own_noise() -> None:
    sampler = sampler_for(SamplingParams(), vocab_size=V)
    p, draws = softmax(LOGITS), 6000
    assert chi_square(Counter(sampler.redraw(p, i) for i in range(draws)), p) < LIMIT
    heads = sum(sampler.flip(0.3, i, 0) for i in range(draws))
    assert abs(heads - 0.3 * draws) < 4 * (0.21 * draws) ** 0.5
    both = sum(sampler.flip(0.3, i, 0) and sampler.flip(0.3, i, 1) for i in range(draws))
    assert abs(both - 0.09 * draws) < 4 * (0.09 * 0.91 * draws) ** 0.5
    same = sum(sampler.redraw(p, i) == sampler.choose(p, i) for i in range(draws))
    chance = float((p**2).sum())
    assert abs(same - chance * draws) < 4 * (chance * (1 - chance) * draws) ** 0.5


def text(sampler: Sampler, length: int = 30) -> list[int]:
    output: list[int] = []
    while len(output) < length:
        output.append(sampler.pick(np.roll(LOGITS, len(output)), output))
    return output


def test_the_same_seed_gives_the_same_text_alone_and_among_others() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    alone = text(sampler_for(params, vocab_size=V, seed=4))
    crowd = [sampler_for(params, vocab_size=V, seed=seed) for seed in range(9)]
    outputs: list[list[int]] = [[] for _ in crowd]
    for step in range(30):
        for sampler, output in zip(crowd, outputs, strict=True):
            output.append(sampler.pick(np.roll(LOGITS, step), output))
    assert outputs[4] == alone == text(sampler_for(params, vocab_size=V, seed=4))
    assert len({tuple(output) for output in outputs}) == 9


def test_samples_of_one_request_differ() -> None:
    texts = {tuple(text(sampler_for(SamplingParams(), vocab_size=V, index=i))) for i in range(4)}
    assert len(texts) == 4


def test_pick_forgets_what_it_was_asked_before() -> None:
    """As after a rejected draft or a preemption: only the arguments count."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2)
    used, outputs = sampler_for(params, [0], V), [[1, 2, 3], [1, 2], [4] * 7, [], [1, 2, 5, 5], [1, 3, 3], [1, 2, 3]]
    for output in outputs:
        fresh = sampler_for(params, [0], V)
        assert np.array_equal(used.distribution(LOGITS, output), fresh.distribution(LOGITS, output))


def test_pick_is_choose_of_the_distribution_and_leaves_the_row_alone() -> None:
    sampler = sampler_for(SamplingParams(top_p=0.9, presence_penalty=1.0, logit_bias={1: 1.0}), vocab_size=V)
    row = LOGITS.copy()
    for position in range(50):
        output = list(range(position))
        output = [token % V for token in output]
        assert sampler.pick(row, output) == sampler.choose(sampler.distribution(row, output), position)
    assert np.array_equal(row, LOGITS)


def test_greedy_takes_the_lowest_best_and_needs_no_logits() -> None:
    sampler = sampler_for(SamplingParams(temperature=0), vocab_size=V)
    logits = np.array([0, 7, 7, 1, 0, 0], np.float32)
    assert sampler.distribution(logits, []).tolist() == [0, 1, 0, 0, 0, 0]
    assert sampler.pick(logits, []) == 1
    assert not sampler.needs_logits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(temperature=0, banned_token_ids=[2]),
        SamplingParams(temperature=0, presence_penalty=0.1),
    ],
)
def test_what_needs_logits_says_so(params: SamplingParams) -> None:
    assert sampler_for(params, vocab_size=V).needs_logits


def test_padding_has_no_mass_even_where_it_is_biggest() -> None:
    padded = np.concatenate([LOGITS, np.full(4, 50, np.float32)])
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(repetition_penalty=2.0)):
        p = sampler_for(params, vocab_size=V).distribution(padded, [])
        assert len(p) == 10
        assert p[:V].sum() == pytest.approx(1)
        assert sampler_for(params, vocab_size=V).pick(padded, []) < V


# --- what each parameter means ----------------------------------------------------------------------------------------


def law(output: list[int] | None = None, prompt: tuple[int, ...] = (), **params: object) -> np.ndarray:
    return sampler_for(SamplingParams(**params), prompt, V).distribution(LOGITS, output or [])  # type: ignore[arg-type]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    changed = LOGITS.copy()
    changed[0] /= 1.5
    changed[5] *= 1.5
    changed[3] *= 1.5
    assert law([3], (0, 5, 0), repetition_penalty=1.5) == pytest.approx(softmax(changed))


def test_frequency_counts_uses_and_presence_counts_once_in_the_output_only() -> None:
    changed = LOGITS.copy()
    changed[0] -= 3 * 0.5 + 0.25
    changed[1] -= 0.5 + 0.25
    assert law([0, 1, 0, 0], (2, 2), frequency_penalty=0.5, presence_penalty=0.25) == pytest.approx(softmax(changed))


def test_bias_is_added_before_penalties_and_held_to_a_hundred() -> None:
    changed = LOGITS.copy()
    changed[5] = (changed[5] + 4) / 2
    assert law([5], logit_bias={5: 4.0}, repetition_penalty=2.0) == pytest.approx(softmax(changed))
    assert law(logit_bias={5: 1e9, 4: 98}).argmax() == 4


def test_allowed_and_banned_tokens() -> None:
    assert np.flatnonzero(law(allowed_token_ids=[1, 3])).tolist() == [1, 3]
    assert np.flatnonzero(law(banned_token_ids=[0, 5])).tolist() == [1, 2, 3, 4]
    assert np.flatnonzero(law(allowed_token_ids=[1, 3], banned_token_ids=[3])).tolist() == [1]


@pytest.mark.parametrize("asked", [{}, {"banned_token_ids": [3]}, {"allowed_token_ids": [1, 2]}])
def test_a_request_does_not_wait_for_its_vocabulary_to_be_sorted(asked: dict[str, list[int]]) -> None:
    """It did: 20 ms to the first token of every request. One pass over a million ids takes far less than this limit."""
    seconds = []
    for _ in range(3):
        start = thread_time()
        sampler_for(SamplingParams(**asked), vocab_size=1_000_000)
        seconds.append(thread_time() - start)
    assert min(seconds) < 0.05


def test_no_end_before_min_tokens() -> None:
    for output, ends in (([], False), ([1], False), ([1, 1], True)):
        p = law(output, min_tokens=2, stop_token_ids=[0])
        assert (p[5] > 0) == (p[0] > 0) == ends


def test_where_only_an_end_is_allowed_min_tokens_gives_way() -> None:
    assert law(min_tokens=2, allowed_token_ids=[5])[5] == 1


def test_temperature_min_p_top_k_and_top_p_in_this_order() -> None:
    p = softmax(LOGITS / 2)
    kept = np.where(p >= 0.2 * p.max(), p, 0)
    assert law(temperature=2.0, min_p=0.2) == pytest.approx(kept / kept.sum())
    top = np.where(np.arange(V) < 3, p, 0)
    assert law(temperature=2.0, top_k=3) == pytest.approx(top / top.sum())
    # Of the three that top-k left, the first two hold over 70 %: top-p sees renormalised mass.
    two = np.where(np.arange(V) < 2, p, 0)
    assert law(temperature=2.0, top_k=3, top_p=0.7) == pytest.approx(two / two.sum())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [6]),
        ("banned_token_ids", [-1]),
        ("banned_token_ids", [2**63]),
        ("logit_bias", {2**70: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("banned_token_ids", [*range(6)]),
        ("logit_bias", {99: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("stop_token_ids", [1000]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as refused:
        sampler_for(SamplingParams(**{field: value}), vocab_size=V)
    assert field in str(refused.value) or refused.value.field == "allowed_token_ids"


def test_an_end_token_of_the_padding_is_harmless() -> None:
    sampler = Sampler(SamplingParams(min_tokens=1), (), V, (5, 99), seed=0)
    assert np.flatnonzero(sampler.distribution(LOGITS, [])).tolist() == [0, 1, 2, 3, 4]
