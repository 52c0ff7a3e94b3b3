"""The head drafter against a slow statement of EAGLE-3: no cache, one sequence, everything computed anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.drafters.base import Context, Observation
from outrider.drafters.head import HeadDrafter, HeadOptions, head_taps
from outrider.drafters.host import Host
from outrider.drafters.registry import create_drafter, needed_taps
from outrider.errors import ConfigError, ModelError
from outrider.models.compiled_head import CompiledHead
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec
from outrider.models.eagle3_files import save_head
from outrider.models.eagle3_store import Dense, stored_head
from outrider.models.spec import DecoderSpec
from outrider.models.torch_head import TorchHead
from outrider.types import Verdict
from scripted import context

HIDDEN, VOCABULARY, DRAFTED = 16, 40, 24
SPEC = Eagle3Spec(
    HIDDEN, VOCABULARY, DRAFTED, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=32, taps=(1, 3, 5)
)
TARGET = DecoderSpec("scripted", VOCABULARY, HIDDEN, 8, 4, 2, 4, 32, 256)
TAPS = (0, 1, 3, 5)  # the target gives one more than the head needs


@pytest.fixture(scope="module", params=["compiled", "torch"])
def parts(request):
    """(what runs the head, the head, the target's embedding)."""
    torch.manual_seed(0)
    head = Eagle3Head(SPEC, tokens=sorted(np.random.default_rng(0).choice(VOCABULARY, DRAFTED, replace=False).tolist()))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    embedding = torch.randn(VOCABULARY, HIDDEN)
    if request.param == "torch":
        return TorchHead(head.eval(), embedding), head, embedding
    stored = stored_head(SPEC, {name: tensor.numpy() for name, tensor in head.state_dict().items()})
    return CompiledHead(stored, Dense(embedding.numpy()), dtype="float32", threads=2), head.eval(), embedding


def feature(prefix):
    """The target's states at the last token of a prefix: any fixed function of it. [taps, hidden]"""
    seed = hash(tuple(prefix)) % 2**32
    return np.random.default_rng(seed).normal(size=(len(TAPS), HIDDEN)).astype(np.float32)


def features(tokens, start, stop):
    return np.stack([feature(tokens[: i + 1]) for i in range(start, stop)], axis=1)


@torch.inference_mode()
def slow(parts, tokens, depth, start=0):
    """A draft by the definition: recompute every slot for every token."""
    _, head, embedding = parts
    used = torch.from_numpy(features(tokens, start, len(tokens) - 1)[[1, 2, 3]])
    states, drafted = head.fuse(used), []
    for _ in range(depth):
        following = torch.tensor([*tokens, *drafted][start + 1 :])
        positions = torch.arange(start, start + len(states))[None]
        step = head.step(states[None], embedding[following][None], positions)
        drafted.append(int(head.target_ids(step.logits[0, -1].argmax())))
        states = torch.cat([states, step.h[0, -1:]])
    return drafted


def drafter(parts, **options):
    return HeadDrafter(parts[0], TAPS, VOCABULARY, **options)


def observe(head, sequence_id, tokens, start, stop):
    seen = Observation(sequence_id, start, tuple(tokens[start:stop]), Verdict(), features(tokens, start, stop))
    head.observe([seen])


def test_a_draft_is_what_the_definition_gives(parts):
    head, tokens = drafter(parts), [3, 1, 4, 1, 5, 9]
    observe(head, 0, tokens, 0, 5)
    draft = head.propose([context(tokens)], [5])[0]
    assert list(draft.tokens) == slow(parts, tokens, 5)
    assert all(0 < c <= 1 for c in draft.confidence)


def test_long_prompts_ragged_batches_and_many_rounds(parts):
    """Three sequences of different lengths, chunked prompts, accepted runs of different lengths."""
    head, rng = drafter(parts), np.random.default_rng(1)
    tokens = {i: rng.integers(0, VOCABULARY, length).tolist() for i, length in enumerate((50, 7, 21))}
    done = dict.fromkeys(tokens, 0)
    for round_ in range(6):
        for i, known in tokens.items():
            if round_ == 0 and i == 0:
                observe(head, i, known, 0, 30)
                done[i] = 30
            observe(head, i, known, done[i], len(known) - 1)
            done[i] = len(known) - 1
        asked = [0, 1, 2] if round_ != 2 else [2, 0]
        depths = [4, 2, 5][: len(asked)]
        drafts = head.propose([context(tokens[i], i) for i in asked], depths)
        for i, depth, draft in zip(asked, depths, drafts, strict=True):
            assert list(draft.tokens) == slow(parts, tokens[i], depth)
        for known in tokens.values():
            known += rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist()


def test_nothing_is_proposed_without_the_latest_states(parts):
    head, tokens = drafter(parts), [3, 1, 4, 1, 5]
    assert head.propose([context(tokens)], [4])[0].tokens == ()
    observe(head, 0, tokens, 0, 3)
    assert head.propose([context(tokens)], [4])[0].tokens == ()
    observe(head, 0, tokens, 3, 4)
    assert len(head.propose([context(tokens)], [4])[0]) == 4


def test_a_found_prompt_finds_its_slots_again(parts):
    """Turn 2 begins with turn 1's tokens, whose pages the target did not compute again."""
    head, first = drafter(parts, archive_tokens=100), [3, 1, 4, 1, 5, 9, 2, 6]
    observe(head, 0, first, 0, 7)
    head.propose([context(first, 0)], [2])
    head.forget(0)
    second = [*first[:6], 7, 7, 8]
    observe(head, 1, second, 4, 8)
    assert list(head.propose([context(second, 1)], [4])[0].tokens) == slow(parts, second, 4)


def test_an_unknown_prefix_starts_at_what_was_seen(parts):
    head, tokens = drafter(parts), [3, 1, 4, 1, 5, 9, 2, 6]
    observe(head, 0, tokens, 4, 7)
    assert list(head.propose([context(tokens)], [3])[0].tokens) == slow(parts, tokens, 3, start=4)


def test_a_chain_stops_behind_a_doubtful_token(parts):
    """The chain of the definition, up to and including the first token below the floor."""
    tokens = [3, 1, 4, 1, 5, 9]
    plain, stopping = drafter(parts), drafter(parts, min_confidence=0.5)
    for head in (plain, stopping):
        observe(head, 0, tokens, 0, 5)
    whole = plain.propose([context(tokens)], [6])[0]
    doubtful = next(i for i, confidence in enumerate(whole.confidence) if confidence < 0.5)
    draft = stopping.propose([context(tokens)], [6])[0]
    assert doubtful < 5
    assert draft.tokens == whole.tokens[: doubtful + 1]
    np.testing.assert_allclose(draft.confidence, whole.confidence[: doubtful + 1], rtol=1e-4)


def test_a_long_backlog_is_computed_while_nothing_is_drafted(parts):
    head, tokens = drafter(parts), np.random.default_rng(2).integers(0, VOCABULARY, 150).tolist()
    for stop in range(1, 150):
        observe(head, 0, tokens, stop - 1, stop)
    state = head._states[0]
    assert state.entries.count == 128
    assert state.backlog == 21
    assert list(head.propose([context(tokens)], [4])[0].tokens) == slow(parts, tokens, 4)


def test_with_a_recall_nothing_is_computed_before_a_draft_is_wanted_and_no_more_than_so_much(parts):
    """The draft is that of a text which begins there; a long rest counts as a text that was just met."""
    head, tokens = drafter(parts, recall=8), np.random.default_rng(1).integers(0, VOCABULARY, 60).tolist()
    observe(head, 0, tokens, 0, 29)
    state = head._states[0]
    assert state.entries.count == 0  # nobody wanted a draft
    assert state.backlog == 8
    (draft,) = head.propose([context(tokens[:30])], [3])
    assert list(draft.tokens) == slow(parts, tokens[:30], 3, start=21)
    assert state.entries.count == 8
    for start in range(29, 40):  # a rest of less than twice as much
        observe(head, 0, tokens, start, start + 1)
    assert state.backlog == 11
    (draft,) = head.propose([context(tokens[:41])], [3])
    assert list(draft.tokens) == slow(parts, tokens[:41], 3, start=32)
    observe(head, 0, tokens, 40, 45)
    (draft,) = head.propose([context(tokens[:46])], [3])
    assert list(draft.tokens) == slow(parts, tokens[:46], 3, start=32)  # what it has read it keeps
    for start in range(45, 59):
        observe(head, 0, tokens, start, start + 1)
        assert state.backlog <= 16


def test_states_behind_a_cached_prompt_that_nobody_drafts_from_do_not_pile_up(parts, monkeypatch):
    monkeypatch.setattr("outrider.drafters.head._UNBEGUN", 100)
    head, tokens = drafter(parts), np.random.default_rng(2).integers(0, VOCABULARY, 160).tolist()
    for start in range(8, 150):
        observe(head, 0, tokens, start, start + 1)
        assert head._states[0].backlog <= 101
    (draft,) = head.propose([context(tokens[:151])], [3])
    assert list(draft.tokens) == slow(parts, tokens[:151], 3, start=8)


def test_the_sequences_own_chooser_decides(parts):
    """One sequence picks the second best of every row, beside one that is greedy; depths differ."""

    class Second:
        plain = False

        def pick(self, logits, output):
            seen.append(list(output))
            return int(np.argsort(-logits, kind="stable")[1])

    seen, head, tokens = [], drafter(parts), [3, 1, 4, 1, 5, 9]
    for i in range(2):
        observe(head, i, tokens, 0, 5)
    contexts = [Context(0, tokens, 4, Second()), context(tokens, 1)]
    other, greedy = head.propose(contexts, [2, 6])
    assert list(greedy.tokens) == slow(parts, tokens, 6)
    first = drafter(parts, width=2)
    observe(first, 2, tokens, 0, 5)
    assert other.tokens[0] == first.propose([context(tokens, 2)], [1])[0].tokens[1]
    assert len(other) == 2
    assert seen[:2] == [[5, 9], [5, 9, other.tokens[0]]]


def test_a_tree_puts_rivals_behind_the_chain(parts):
    head, tokens = drafter(parts, width=3), [3, 1, 4, 1, 5]
    observe(head, 0, tokens, 0, 4)
    draft = head.propose([context(tokens)], [3])[0]
    assert list(draft.tokens[:3]) == slow(parts, tokens, 3)
    assert draft.parents == (-1, 0, 1, -1, -1, 0, 0, 1, 1)
    assert all(len({draft.tokens[c] for c in draft.children(node)}) == 3 for node in (-1, 0, 1))
    assert draft.confidence[0] > draft.confidence[3] > draft.confidence[4]


def test_the_archive_is_bounded_and_forget_releases(parts):
    head = drafter(parts, archive_tokens=20)
    for i in range(10):
        tokens = [i, 1, 2, 3, 4, 5, 6, 7]
        observe(head, i, tokens, 0, 7)
        head.propose([context(tokens, i)], [2])
        head.forget(i)
        head.forget(i)
    assert not head.held
    assert head._archive.tokens <= 20
    assert len(head._archive) == 2


def test_a_head_is_built_from_its_folder_and_names_its_taps(parts, tmp_path):
    _, head, embedding = parts
    save_head(head, tmp_path)

    class Target:
        spec, taps = TARGET, TAPS

    stored = Dense(embedding.numpy())
    entry = {"name": "head", "path": str(tmp_path)}
    assert needed_taps(["ngram", entry], TARGET) == (1, 3, 5) == head_taps(str(tmp_path), TARGET)
    built = create_drafter(entry, Host(VOCABULARY, target=Target(), weights={"embed": stored}))
    tokens = [3, 1, 4, 1, 5]
    observe(built, 0, tokens, 0, 4)
    assert built.name == tmp_path.name
    assert len(built.propose([context(tokens)], [4])[0]) == 4
    Target.taps = (1, 3)
    with pytest.raises(ModelError, match=r"layers \[5\]"):
        create_drafter(entry, Host(VOCABULARY, target=Target(), weights={"embed": stored}))


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs a path"):
        HeadOptions()
    with pytest.raises(ConfigError, match="width"):
        HeadOptions(path="x", width=9)
    with pytest.raises(ConfigError, match="min_confidence"):
        HeadOptions(path="x", min_confidence=1.0)
    with pytest.raises(ConfigError, match="threads = 0"):
        HeadOptions(path="x", threads=0)
    with pytest.raises(ModelError, match=r"config\.json"):
        head_taps(str(tmp_path), TARGET)
    with pytest.raises(ConfigError, match="needs the target"):
        create_drafter({"name": "head", "path": "x"}, Host(40))
