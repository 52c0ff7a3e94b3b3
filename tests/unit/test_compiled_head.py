"""The compiled head computes what the head in PyTorch computes, for every wiring, type and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.models.compiled_head import CompiledHead
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec
from outrider.models.eagle3_store import Dense, stored_head
from outrider.models.head import Job
from outrider.models.spec import Rope
from outrider.models.torch_head import TorchHead

WIRINGS = {
    "plain": {},
    "biases and a normed residual": {"attention_bias": True, "norm_before_residual": True},
    "odd sizes": {"hidden_size": 40, "head_dim": 24, "num_heads": 6, "num_kv_heads": 1, "activation": "gelu_tanh"},
    "yarn": {
        "head_dim": 64,
        "num_heads": 6,
        "num_kv_heads": 3,
        "intermediate_size": 33,
        "rope": Rope(5000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    },
}
ROWS = (30, 1, 3, 200)  # committed rows of four sequences
DEPTHS = (4, 5, 0, 2)


def spec_of(wiring):
    base = {"hidden_size": 48, "vocab_size": 120, "draft_vocab_size": 71, "num_heads": 4, "num_kv_heads": 2}
    return Eagle3Spec(**{**base, "head_dim": 16, "intermediate_size": 72, "taps": (0, 1, 2), **WIRINGS[wiring]})


def both(wiring, dtype="float32", threads=2):
    """The head compiled, and in PyTorch."""
    spec, rng = spec_of(wiring), np.random.default_rng(0)
    torch.manual_seed(0)
    head = Eagle3Head(spec, sorted(rng.choice(spec.vocab_size, spec.draft_vocab_size, replace=False).tolist()))
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    embedding = rng.standard_normal((spec.vocab_size, spec.hidden_size)).astype(np.float32)
    stored = stored_head(spec, {name: tensor.numpy() for name, tensor in head.state_dict().items()})
    compiled = CompiledHead(stored, Dense(embedding), dtype=dtype, threads=threads)
    return compiled, TorchHead(head.eval(), torch.from_numpy(embedding))


def jobs_of(backend, depths=DEPTHS, rows=ROWS):
    """The same four sequences for any backend."""
    rng, spec = np.random.default_rng(1), backend.spec
    return [
        Job(
            backend.entries(),
            rng.standard_normal((count, len(spec.taps) * spec.hidden_size)).astype(np.float32),
            rng.integers(0, spec.vocab_size, count).tolist(),
            7,
            depth,
        )
        for count, depth in zip(rows, depths, strict=True)
    ]


def go_on(jobs, guesses, seed):
    """A second round behind the first one: some of the drafted tokens came true."""
    rng = np.random.default_rng(seed)
    for job, guess in zip(jobs, guesses, strict=True):
        count = 1 + len(guess.tokens) // 2
        job.first += len(job.tokens)
        job.features = rng.standard_normal((count, job.features.shape[1])).astype(np.float32)
        job.tokens = [*guess.tokens[: count - 1], 5]
        job.depth = 3


@pytest.mark.parametrize("wiring", WIRINGS)
def test_fp32_drafts_what_pytorch_drafts(wiring):
    compiled, reference = both(wiring)
    mine, theirs = jobs_of(compiled), jobs_of(reference)
    for round_ in range(2):
        drafted, wanted = compiled.greedy(mine, 0.0), reference.greedy(theirs, 0.0)
        assert [guess.tokens for guess in drafted] == [guess.tokens for guess in wanted]
        for guess, right in zip(drafted, wanted, strict=True):
            np.testing.assert_allclose(guess.confidence, right.confidence, rtol=1e-3)
        for job, right in zip(mine, theirs, strict=True):
            assert job.entries.count == right.entries.count
            np.testing.assert_allclose(job.entries.keys, right.entries.keys, rtol=1e-3, atol=1e-4)
        go_on(mine, drafted, round_)
        go_on(theirs, wanted, round_)
    assert [len(guess.tokens) for guess in drafted] == [3] * 4


@pytest.mark.parametrize("wiring", WIRINGS)
def test_int8_stays_close(wiring):
    """Logits of two tokens of a chain that somebody else chooses, and keys; errors as shares of their spread."""
    compiled, reference = both(wiring, "auto")
    mine, theirs = jobs_of(compiled, (2,) * 4), jobs_of(reference, (2,) * 4)
    chains = compiled.chain(mine), reference.chain(theirs)
    for tokens, most in (([3, 1, 4, 1], 0.08), ([5, 9, 2, 6], 0.2)):
        logits, wanted = (chain.logits.copy() for chain in chains)
        assert 0 < (logits - wanted).std() < most * wanted.std()
        for chain in chains:
            chain.extend(tokens)
    for job, right in zip(mine, theirs, strict=True):
        assert 0 < np.abs(job.entries.keys - right.entries.keys).max() < 0.02 * np.abs(right.entries.keys).max()


def test_chains_agree_with_greedy_drafts():
    compiled, _ = both("plain")
    greedy = compiled.greedy(jobs_of(compiled, (3,) * 4), 0.0)
    chain = compiled.chain(jobs_of(compiled, (3, 1, 2, 1)))
    for depth in range(3):
        best = compiled.ids[chain.logits.argmax(axis=1)]
        assert best.tolist() == [guess.tokens[depth] for guess in greedy]
        chain.extend(best.tolist())


def test_threads_and_company_change_no_bit():
    """A sequence alone on one thread, and among others on three."""
    alone, crowded = both("yarn", "auto", threads=1)[0], both("yarn", "auto", threads=3)[0]
    wanted = [alone.greedy([job], 0.0)[0] for job in jobs_of(alone)]
    drafted = crowded.greedy(jobs_of(crowded), 0.0)
    assert [guess.tokens for guess in drafted] == [guess.tokens for guess in wanted]
    for guess, right in zip(drafted, wanted, strict=True):
        np.testing.assert_allclose(guess.confidence, right.confidence, rtol=1e-5)  # its sum is cut by threads


def test_a_head_that_breaks_proposes_nothing():
    """States of NaN give no probability, and so no token."""
    compiled, _ = both("plain", "auto")
    jobs = jobs_of(compiled)
    jobs[0].features[-1] = np.nan
    drafted = compiled.greedy(jobs, 0.0)
    assert drafted[0].tokens == []
    assert len(drafted[1].tokens) == 5
