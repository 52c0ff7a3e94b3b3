"""The model drafter: right tokens from its own cache whatever became of its drafts, nothing proposed from padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import Context
from outrider.drafters.host import Host
from outrider.drafters.model import ModelDrafter, ModelOptions, check_tokenizer, default_kv_tokens
from outrider.errors import ConfigError
from outrider.speculation.guard import GuardedDrafter
from outrider.speculation.store import DraftStore
from scripted import ScriptedDecoder, context, plain, whole_prefix

SCRIPT = whole_prefix(50)


def drafter(script=SCRIPT, pages=64, vocab_size=50, width=50, **options):
    decoder = ScriptedDecoder(script, vocab_size=width)
    return ModelDrafter(decoder, DraftStore(decoder.new_cache(pages, 4)), vocab_size, **options)


def test_it_drafts_what_its_model_would_say():
    draft = drafter().propose([context([1, 2, 3])], [5])[0]
    assert list(draft.tokens) == plain(SCRIPT, [1, 2, 3], 5)
    assert draft.drafter == "model"
    assert all(0.99 < c <= 1 for c in draft.confidence)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_is_right_after_any_history(data):
    """Random sequences, depths and continuations: accepted, partly accepted, replaced, longer than the draft."""
    model, truth = drafter(pages=200), {i: [i + 1, 7] for i in range(3)}
    for _ in range(data.draw(st.integers(1, 8))):
        ids = data.draw(st.lists(st.sampled_from(sorted(truth)), min_size=1, max_size=3, unique=True))
        depths = [data.draw(st.integers(0, 5)) for _ in ids]
        drafts = model.propose([context(truth[i], i) for i in ids], depths)
        for i, depth, draft in zip(ids, depths, drafts, strict=True):
            assert list(draft.tokens) == plain(SCRIPT, truth[i], depth)
            kept = data.draw(st.integers(0, len(draft)))
            truth[i] += [*draft.tokens[:kept], *data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=3))]
        if data.draw(st.booleans()):
            model.forget(ids[0])
    for i in truth:
        model.forget(i)
    assert model._store.held == 0


def test_accepted_tokens_are_not_computed_again():
    model, tokens = drafter(), list(range(40))
    draft = model.propose([context(tokens)], [4])[0]
    before = model._decoder.rows
    tokens += [*draft.tokens, 9]
    model.propose([context(tokens)], [1])
    assert model._decoder.rows - before == 2  # the last drafted token, whose KV nobody needed, and the bonus


def test_after_a_lost_vote_only_the_new_tokens_are_computed():
    model, tokens = drafter(), list(range(40))
    model.propose([context(tokens)], [4])
    before = model._decoder.rows
    tokens += [44, 45, 46]
    draft = model.propose([context(tokens)], [1])[0]
    assert model._decoder.rows - before == 3
    assert list(draft.tokens) == plain(SCRIPT, tokens, 1)


def test_all_sequences_share_one_pass_per_depth():
    model = drafter()
    model.propose([context([i, 1, 2], i) for i in range(6)], [1, 2, 3, 4, 4, 0])
    assert model._decoder.calls == 4
    assert model._decoder.rows == 5 * 3 + 4 + 3 + 2


def test_long_prompts_are_computed_in_chunks():
    model, tokens = drafter(pages=400), [i % 50 for i in range(1400)]
    assert list(model.propose([context(tokens)], [2])[0].tokens) == plain(SCRIPT, tokens, 2)
    assert model._decoder.calls == 4


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_with_a_recall_it_knows_the_end_of_a_text_and_what_came_after(data):
    """It drafts as its model would behind a text that begins `recall` tokens before it met it, or met it again."""
    recall = data.draw(st.integers(1, 12))
    model, tokens, first = drafter(pages=200, recall=recall), [i % 50 for i in range(30)], 30 - recall
    known = 0
    for _ in range(data.draw(st.integers(1, 8))):
        if known and len(tokens) - known > recall:
            first = len(tokens) - recall
        before = model._decoder.rows
        depth = data.draw(st.integers(1, 4))
        draft = model.propose([context(tokens)], [depth])[0]
        assert list(draft.tokens) == plain(SCRIPT, tokens[first:], depth)
        assert model._decoder.rows - before <= recall + depth + 3  # what it had drafted in vain is computed again
        known = len(tokens)
        tokens += [*draft.tokens[: data.draw(st.integers(0, len(draft)))], 9]
        tokens += data.draw(st.sampled_from([[], [], list(range(14))]))
    model.forget(0)
    assert model._store.held == 0


def test_a_recall_goes_on_where_the_models_positions_end():
    """It begins anew with the last tokens, however long the text has become, and whatever recall was asked for."""
    decoder = ScriptedDecoder(SCRIPT, vocab_size=50)
    decoder.spec = replace(decoder.spec, max_positions=16)
    model, tokens = ModelDrafter(decoder, DraftStore(decoder.new_cache(64, 4)), 50, recall=64), list(range(5))
    for _ in range(40):
        draft = model.propose([context(tokens)], [4])[0]
        assert len(draft) == 4
        tokens += draft.tokens[:2]
    short = model.propose([context(tokens[:3])], [2])[0]  # a sequence that has become shorter than what is held of it
    assert list(short.tokens) == plain(SCRIPT, tokens[:3], 2)


def test_what_it_does_not_recall_is_not_counted_as_unread():
    guarded = GuardedDrafter(drafter(recall=8), 50)
    assert guarded.unread(context(list(range(40)))) == 8
    assert GuardedDrafter(drafter(), 50).unread(context(list(range(40)))) == 40


@pytest.mark.parametrize("width", [32, 48])
def test_padding_is_never_proposed(width):
    """Target tokenizer of 40 ids; the drafter's logits are 32 or 48 wide, and padding looks best to it."""

    def script(prefix):
        logits = np.arange(width, dtype=np.float32)
        return np.roll(logits, len(prefix) % 3)

    draft = drafter(script, vocab_size=40, width=width).propose([context([1, 2])], [6])[0]
    assert len(draft) == 6
    assert max(draft.tokens) < min(40, width)


def test_a_token_unknown_to_the_drafter_silences_it_for_that_sequence_only():
    model = drafter(lambda prefix: len(prefix) % 30, vocab_size=40, width=32)
    drafts = model.propose([context([1, 35], 0), context([1, 2], 1)], [3, 3])
    assert drafts[0].tokens == ()
    assert len(drafts[1]) == 3


def test_a_chooser_decides():
    class Second:
        def pick(self, logits, output):
            seen.append(list(output))
            return int(np.argsort(logits)[-2])

    seen = []
    script = lambda prefix: np.arange(50, dtype=np.float32)  # noqa: E731
    asked = Context(0, [1, 2, 3], prompt_length=2, chooser=Second())
    assert drafter(script).propose([asked], [3])[0].tokens == (48, 48, 48)
    assert seen == [[3], [3, 48], [3, 48, 48]]


def test_low_confidence_ends_a_draft():
    def script(prefix):
        logits = np.zeros(50, np.float32)
        logits[7] = 9.0 if len(prefix) < 5 else 1.0
        return logits

    draft = drafter(script, min_confidence=0.5).propose([context([1, 2, 3])], [8])[0]
    assert len(draft) == 3
    assert draft.confidence[-1] < 0.5 < draft.confidence[0]


def test_pages_are_taken_from_idle_sequences_and_a_full_store_skips():
    model = drafter(pages=8)
    model.propose([context([1] * 16, 0)], [4])
    assert len(model.propose([context([2] * 20, 1)], [4])[0]) == 4
    assert set(model._states) == {1}
    assert model.propose([context([3] * 40, 2)], [4])[0].tokens == ()
    assert len(model.propose([context([2] * 20, 1), context([4] * 16, 3)], [4, 4])[1]) == 0


def test_positions_of_the_drafter_bound_the_draft():
    model = drafter()
    model._decoder.spec = ScriptedDecoder(SCRIPT, max_positions=6).spec
    assert len(model.propose([context([1, 2, 3, 4])], [5])[0]) == 2
    assert len(model.propose([context([1, 2, 3, 4, 5, 6])], [5])[0]) == 0


def test_another_tokenizer_is_refused_by_the_first_token_that_differs():
    class Words:
        def __init__(self, words):
            self.words, self.vocab_size = words, len(words)

        def first_difference(self, other):
            pairs = zip(self.words, other.words, strict=False)
            return next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)

    check_tokenizer(Words(["a", "b"]), Words(["a", "b", "pad"]), "small")
    with pytest.raises(ConfigError, match=r"token 1 is 'x' there and 'b' in the target"):
        check_tokenizer(Words(["a", "b"]), Words(["a", "x"]), "small")


def test_a_failed_pass_leaves_no_wrong_entries():
    """The third pass of a draft fails; the next draft is right all the same."""
    model, tokens = drafter(), [1, 2, 3]
    forward, calls = model._decoder.forward, []

    def fragile(batch, cache):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("lost")
        return forward(batch, cache)

    model._decoder.forward = fragile
    with pytest.raises(RuntimeError):
        model.propose([context(tokens)], [5])
    tokens += plain(SCRIPT, tokens, 4)
    assert list(model.propose([context(tokens)], [4])[0].tokens) == plain(SCRIPT, tokens, 4)


def test_options_and_sizes():
    with pytest.raises(ConfigError, match="needs a path"):
        ModelDrafter.build(ModelOptions(), Host(50))
    with pytest.raises(ConfigError, match="min_confidence"):
        ModelOptions(path="x", min_confidence=1.0)
    assert default_kv_tokens(Host(50, max_sequences=2, max_model_len=8192)) == 8192 + 128
    assert default_kv_tokens(Host(50, max_sequences=16, max_model_len=8192)) == 16 * 2048 + 1024
