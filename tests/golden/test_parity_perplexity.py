"""The default model predicts a text as transformers does with the same weights, dequantised to fp32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from outrider.models.build import build_decoder
from outrider.models.load import load_model

#: Jane Austen, Pride and Prejudice (1813), chapter 1.
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of
a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this
truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of some one
or other of their daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park
is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just been here, and
she told me all about it." Mr. Bennet made no answer. "Do you not want to know who has taken it?" cried his wife
impatiently. "You want to tell me, and I have no objection to hearing it." This was invitation enough. "Why, my dear,
you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from the north of England; that
he came down on Monday in a chaise and four to see the place, and was so much delighted with it that he agreed with Mr.
Morris immediately; that he is to take possession before Michaelmas, and some of his servants are to be in the house by
the end of next week." """
WINDOW = 160


def _script():
    path = Path(__file__).parents[2] / "scripts" / "perplexity.py"
    module_spec = importlib.util.spec_from_file_location("perplexity", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


perplexity = _script()


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def windows(loaded):
    parts = perplexity.cut(loaded.tokenizer.encode(TEXT), WINDOW)
    assert len(parts) > 1
    return parts


@pytest.fixture(scope="module")
def theirs(loaded, windows):
    """transformers' logits of each window."""
    score = perplexity.transformers_scorer(loaded)
    return [score(part) for part in windows]


def value(logits, windows) -> float:
    losses = [perplexity.loss(*pair) for pair in zip(logits, windows, strict=True)]
    return float(np.exp(np.concatenate(losses).mean()))


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("auto", 1e-2)])
def test_perplexity_is_that_of_transformers(loaded, windows, theirs, dtype, tolerance):
    decoder = build_decoder(loaded.spec, loaded.weights, dtype=dtype, device="cpu", backend="compiled")
    score = perplexity.decoder_scorer(decoder, WINDOW)
    ours = [score(part) for part in windows]
    assert not np.array_equal(ours[0], theirs[0]), "two computations, not one twice"
    assert value(ours, windows) == pytest.approx(value(theirs, windows), rel=tolerance)


@pytest.mark.model
def test_the_reference_gives_the_same_logits(loaded, windows, theirs):
    decoder = build_decoder(loaded.spec, loaded.weights, dtype="float32", device="cpu", backend="reference")
    ours = perplexity.decoder_scorer(decoder, WINDOW)(windows[-1][:24])
    assert np.abs(ours - theirs[-1][:24]).max() < 1e-3 * np.abs(theirs[-1]).max()


def test_a_loss_that_is_known():
    """Uniform logits over V tokens have perplexity V, whatever the text."""
    assert perplexity.perplexity(
        lambda part: np.zeros((len(part), 11), np.float32), [1, 2, 3, 4, 5], 2
    ) == pytest.approx(11)
    sure = np.full((3, 11), -50.0, np.float32)
    sure[[0, 1], [2, 3]] = 0.0
    assert perplexity.loss(sure, [1, 2, 3]) == pytest.approx([0, 0], abs=1e-12)
