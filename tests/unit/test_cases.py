"""Cases that engines of this kind have got wrong, on the whole engine with 1, 2 and 3 drafters and several lengths.

"Same as off" is the right answer of most: what a request says never depends on who guessed for it. Each test also shows
that something was drafted, accepted and rejected, so that it cannot pass while speculation is off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness import Harness
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter
from outrider.sampling.sampler import Sampler
from outrider.speculation.build import assemble
from outrider.types import SamplingParams
from scripted import Script, plain, random_logits, walk
from scripted_drafters import ConstantDrafter, DeadDrafter, HalfOracleDrafter, JunkDrafter, OracleDrafter, TreeDrafter

LENGTHS = [1, 2, 5, 8]
PROMPTS = [[1, 2, 3], [7, 7], [4, 3, 2, 1, 0], [5]]
LOGITS = random_logits(vocab_size=12, seed=3)
SETS: dict[str, Callable[[Script, int], list[Drafter]]] = {
    "one": lambda script, v: [HalfOracleDrafter(script, v, right=1)],
    "two, disagreeing": lambda script, v: [HalfOracleDrafter(script, v), JunkDrafter(script, v)],
    "three, one dead": lambda script, v: [
        OracleDrafter(script, v),
        HalfOracleDrafter(script, v, right=1),
        DeadDrafter(script, v),
    ],
}


def engine(script: Script, drafters: Sequence[Drafter], length: int, vocab_size: int, **options: object) -> Harness:
    """An engine whose drafters vote by hedge; without drafters it decodes plainly."""
    if not drafters:
        return Harness(script, vocab_size=vocab_size, **options)
    config = SpeculativeConfig(vote="hedge", num_speculative_tokens=length)
    return Harness(script, speculator=assemble(drafters, config, vocab_size), vocab_size=vocab_size, **options)


def outcome(harness: Harness, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[object]:
    """Tokens, reasons and log-probabilities of every answer."""
    ids = [harness.submit(prompt, params) for prompt in prompts]
    harness.drain()
    logprobs = [[p for d in harness.deltas if d.request_id == i for p in d.logprobs] for i in ids]
    return [[harness.tokens(i) for i in ids], [harness.finishes(i) for i in ids], logprobs]


PARAMETERS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, top_k=4, seed=5),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.8, min_p=0.05, seed=6),
    "frequency": SamplingParams(temperature=0, frequency_penalty=2.0),
    "frequency, rewarding": SamplingParams(temperature=0, frequency_penalty=-2.0),
    "presence": SamplingParams(temperature=0, presence_penalty=1.5),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.7),
    "bias": SamplingParams(temperature=0, logit_bias={3: -100.0, 5: 2.0}),
    "allowed": SamplingParams(temperature=0.9, seed=2, allowed_token_ids=[1, 4, 6, 7]),
    "banned": SamplingParams(temperature=0, banned_token_ids=[2, 9]),
    "least": SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[1, 2, 3, 4]),
    "stop ids": SamplingParams(temperature=0.9, seed=3, stop_token_ids=[6]),
    "stop string": SamplingParams(temperature=0.9, seed=4, stop=["7 1", "4 "]),
    "logprobs": SamplingParams(temperature=0.7, seed=8, logprobs=2),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("drafters", SETS, ids=str)
def test_every_parameter_gives_the_same_as_off(drafters: str, length: int) -> None:
    drafted = accepted = 0
    for name, params in PARAMETERS.items():
        params = replace(params, max_tokens=20)
        expected = outcome(engine(LOGITS, [], length, 12), params)
        harness = engine(LOGITS, SETS[drafters](LOGITS, 12), length, 12)
        assert outcome(harness, params) == expected, name
        drafted, accepted = drafted + harness.drafted, accepted + harness.accepted
    assert drafted > accepted > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_penalties_take_effect_under_speculation(length: int) -> None:
    """vLLM 18902: penalties of 2 and -2 differ from each other and from none."""
    answers = [
        outcome(engine(LOGITS, [OracleDrafter(LOGITS, 12)], length, 12), SamplingParams(temperature=0, **penalty))[0]
        for penalty in ({"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {})
    ]
    assert len({str(answer) for answer in answers}) == 3


def flat(favourite: int, second: int, margin: float) -> Script:
    """Logits that always prefer one token by a margin."""
    row = np.zeros(12, np.float32)
    row[second], row[favourite] = 5.0, 5.0 + margin
    return lambda prefix: row


@pytest.mark.parametrize("length", LENGTHS)
def test_a_penalty_turns_the_choice_at_the_right_token(length: int) -> None:
    """SGLang 33643: a run of accepted tokens enters the penalty state whole, not its last token only."""
    script = flat(favourite=3, second=8, margin=2.9)  # three uses cost 3.0
    harness = engine(script, [ConstantDrafter(script, 12, token=3)], length, 12)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=5)
    assert outcome(harness, params, [[1]])[0] == [[3, 3, 3, 8, 3]]
    assert harness.accepted > 0 or length == 1


@pytest.mark.parametrize("length", LENGTHS)
def test_min_tokens_counts_tokens_not_steps(length: int) -> None:
    script = flat(favourite=9, second=3, margin=1.0)
    harness = engine(script, [ConstantDrafter(script, 12, token=3)], length, 12, eos=[9])
    assert outcome(harness, SamplingParams(temperature=0, min_tokens=4), [[1]])[0] == [[3, 3, 3, 3, 9]]
    assert harness.accepted > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_banned_token_appears_at_no_position(length: int) -> None:
    """vLLM 42744: a bias holds at every position of a draft, not at the last only."""
    guess = plain(LOGITS, PROMPTS[0], 20)
    for banned in guess[:4]:
        harness = engine(LOGITS, [OracleDrafter(LOGITS, 12)], length, 12)
        answer = outcome(
            harness, SamplingParams(temperature=0, max_tokens=20, logit_bias={banned: -100.0}), PROMPTS[:1]
        )
        assert banned not in answer[0][0]
        assert harness.drafted > 0


@pytest.mark.parametrize(("limit", "expected", "reason"), [(5, 3, "stop"), (6, 3, "stop"), (2, 2, "length")])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_stop_is_not_hidden_by_the_length(length: int, limit: int, expected: int, reason: str) -> None:
    """SGLang 31599: [10, 11, STOP, 20, 21, 22]."""
    script: Script = lambda prefix: [10, 11, 7, 20, 21, 22][len(prefix) - 1]  # noqa: E731
    harness = engine(script, [OracleDrafter(script)], length, 50)
    request = harness.submit([1], SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[7]))
    harness.drain()
    assert (len(harness.tokens(request)), harness.finishes(request)) == (expected, [reason])


@pytest.mark.parametrize("length", LENGTHS)
def test_seeds_do_not_depend_on_company(length: int) -> None:
    """vLLM 6038, TensorRT-LLM 17599."""
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16)
    alone = outcome(engine(LOGITS, [HalfOracleDrafter(LOGITS, 12)], length, 12), params, PROMPTS[:1])[0][0]
    crowd = engine(LOGITS, [HalfOracleDrafter(LOGITS, 12)], length, 12)
    others = [crowd.submit(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(PROMPTS * 2)]
    mine = crowd.submit(PROMPTS[0], params)
    crowd.drain()
    assert crowd.tokens(mine) == alone
    assert crowd.tokens(others[0]) != alone


@pytest.mark.parametrize("length", LENGTHS)
def test_log_probabilities_are_the_targets(length: int) -> None:
    """llama.cpp 27972: accepted, corrected and bonus tokens alike."""
    harness = engine(LOGITS, [HalfOracleDrafter(LOGITS, 12)], length, 12)
    tokens, _, logprobs = outcome(harness, SamplingParams(temperature=0, logprobs=0, max_tokens=20), PROMPTS[:1])
    prefix = list(PROMPTS[0])
    for token, told in zip(tokens[0], logprobs[0], strict=True):
        row = LOGITS(tuple(prefix)).astype(np.float64)
        assert told.logprob == pytest.approx(row[token] - math.log(np.exp(row).sum()), abs=1e-4)
        prefix.append(token)
    assert harness.accepted > 0


def test_sampling_through_drafts_follows_the_exact_law() -> None:
    """transformers 47932, vLLM PR 44869: 3 tokens of 6, T 0.8, top-k 4, drafted for by two drafters that vote."""
    script, prompt, draws = random_logits(vocab_size=6, seed=9), [1, 2], 5000
    params = SamplingParams(temperature=0.8, top_k=4, max_tokens=3)
    harness = engine(
        script,
        [HalfOracleDrafter(script, 6, right=1), JunkDrafter(script, 6)],
        2,
        6,
        max_num_seqs=64,
        pages=256,
        prefix_caching=False,
    )
    ids = [harness.submit(prompt, replace(params, seed=seed)) for seed in range(draws)]
    harness.drain()
    answers = harness.outputs()
    seen = Counter(tuple(answers[i]) for i in ids)
    law = exact_law(script, prompt, params)
    assert set(seen) <= set(law)  # no mass outside the support
    chi_square = sum((seen[answer] - draws * p) ** 2 / (draws * p) for answer, p in law.items())
    freedom = len(law) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)
    assert harness.drafted > harness.accepted > 0


def exact_law(script: Script, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens."""
    sampler = Sampler(params, prompt, 6, (), seed=0)
    law = {(): 1.0}
    for _ in range(3):
        law = {
            (*answer, token): p * float(q)
            for answer, p in law.items()
            for token, q in enumerate(sampler.distribution(script((*prompt, *answer)), answer))
            if q > 0
        }
    return law


@pytest.mark.parametrize("drafted_ids", [40, 48])
def test_no_id_beyond_the_tokenizer_is_emitted(drafted_ids: int) -> None:
    """vLLM 7252: a target of 40 ids of text; drafters that propose ids up to 48 are contained."""
    script = walk(vocab_size=40)
    harness = engine(script, [OracleDrafter(script, 40), ConstantDrafter(script, 40, token=drafted_ids - 1)], 4, 40)
    assert outcome(harness, SamplingParams(temperature=0, max_tokens=20))[0] == [plain(script, p, 20) for p in PROMPTS]
    assert harness.accepted > 0


def test_a_dead_drafter_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp 25908: silently inactive speculation is a warning and an acceptance length of 1."""
    harness = engine(LOGITS, [JunkDrafter(LOGITS, 12)], 4, 12, pages=200)
    outcome(harness, SamplingParams(temperature=0, max_tokens=150))
    assert any("does not speed anything up" in record.message for record in caplog.records)
    assert harness.speculator.report().acceptance_length == 1.0


def test_each_request_gets_the_better_source() -> None:
    """vLLM 18633: two kinds of traffic in one batch, two drafters, one good for each."""
    left, right = walk(vocab_size=50, seed=1), walk(vocab_size=50, seed=2)
    script: Script = lambda prefix: (left if prefix[0] < 25 else right)(prefix)  # noqa: E731
    drafters = [OracleDrafter(left, name="left"), OracleDrafter(right, name="right")]
    harness = engine(script, drafters, 4, 50, pages=200)
    ids = {
        side: harness.submit([first, 1], SamplingParams(temperature=0, max_tokens=80))
        for side, first in (("left", 3), ("right", 40))
    }
    harness.drain()
    for side, request in ids.items():
        late = [d for d in harness.deltas if d.request_id == request and d.drafted][8:]
        assert late
        assert all(d.drafter == side for d in late)


def test_times_are_reported_by_phase() -> None:
    """vLLM 21278: draft, verify and overhead are told apart."""
    harness = engine(LOGITS, [HalfOracleDrafter(LOGITS, 12)], 4, 12)
    outcome(harness, SamplingParams(temperature=0, max_tokens=20))
    report = harness.speculator.report()
    assert report.steps == harness.engine.steps
    assert min(report.draft_s, report.verify_s, report.overhead_s) > 0


def test_a_tree_beside_chains_changes_nothing() -> None:
    script = walk(vocab_size=50)
    harness = engine(script, [TreeDrafter(script)], 8, 50)
    assert outcome(harness, SamplingParams(temperature=0, max_tokens=20))[0] == [plain(script, p, 20) for p in PROMPTS]
    assert harness.drafted > harness.accepted > 0
