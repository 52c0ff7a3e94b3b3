"""The retrieval head against the head as a PyTorch module: keys, queries, scores, and what is kept between steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError, ModelError
from outrider.memory.look import Gain, Look
from outrider.memory.select.base import View
from outrider.memory.select.head import HeadSelector
from outrider.memory.select.head_kernels import project, score_entries
from outrider.memory.select.head_memory import HeadMemory
from outrider.memory.select.head_weights import Embeddings, extend, load_weights, shorten
from outrider.memory.selectors import Choice, read_selector
from outrider.memory.tiers.codec import to_bfloat16
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec
from outrider.models.eagle3_files import save_head
from outrider.models.eagle3_store import Dense
from outrider.models.rope import rope_tables
from outrider.models.spec import DecoderSpec, Rope

PAGE, PAGES, VOCABULARY = 4, 40, 50
GIVEN = (0, 1, 3, 5)  # the target gives one layer more than the head needs


def parts(tmp_path, hidden=24, kv_heads=2, head_dim=6, bias=False, positions=64):
    """A random head as a module, and the memory made of its folder."""
    torch.manual_seed(0)
    spec = Eagle3Spec(
        hidden, VOCABULARY, 20, 4, kv_heads, head_dim, 32, (1, 3, 5), max_positions=positions, attention_bias=bias
    )
    head = Eagle3Head(spec)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    save_head(head, tmp_path)
    target = DecoderSpec("scripted", VOCABULARY, hidden, 8, 4, 2, head_dim, 32, 256)
    table = np.random.default_rng(1).normal(size=(VOCABULARY, hidden)).astype(np.float32)
    weights, embeddings = load_weights(str(tmp_path), target, Dense(table), 64)
    memory = HeadMemory(weights, embeddings, lambda: GIVEN, PAGES, PAGE)
    return head.eval(), table.astype(np.float16).astype(np.float32), memory, target


def history(length, hidden=24, seed=3):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, length + 1).tolist(), rng.normal(size=(4, length, hidden)).astype(np.float32)


def slots_of(pages, start, stop):
    entries = np.arange(start, stop)
    return (pages[entries // PAGE] * PAGE + entries % PAGE).astype(np.int32)


def feed(memory, pages, tokens, states, cuts, sequence=0):
    """Commit entries up to every cut, in steps."""
    start = cuts[0]
    for stop in cuts[1:]:
        memory.follow([Look(sequence, start, stop - start, pages)])
        slots = slots_of(pages, start, stop)
        memory.learn([Gain(sequence, start, slots, tokens[start:stop], tokens[stop], None, states[:, start:stop])])
        start = stop


@torch.inference_mode()
def expected(head, table, tokens, states):
    """Keys [KV heads, entries 1 .., d] and the query [heads, d] by the module."""
    fused = head.fuse(torch.from_numpy(states[[1, 2, 3]]))
    ahead = torch.from_numpy(table[tokens[1 : len(fused) + 1]])
    positions = torch.arange(len(fused))[None]
    layer = head.midlayer
    joined = layer._join(ahead[None], layer.hidden_norm(fused)[None])
    keys = layer.self_attn.entries(joined, positions).k[0]
    query = layer.self_attn._rotate(layer.self_attn._heads(layer.self_attn.q_proj(joined)), positions)[0, -1]
    return keys[:, :-1].numpy(), query.numpy()


def kept(memory, pages, length):
    slots = slots_of(pages, 1, length)
    bits = memory.keys[slots // PAGE, :, slots % PAGE].astype(np.uint32) << 16
    return bits.view(np.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cuts", [[0, 19], [0, 5, 6, 7, 8, 9, 10, 14, 19], [0, 4, 8, 16, 18, 19]])
def test_keys_and_queries_are_the_modules(tmp_path, cuts, bias):
    head, table, memory, _ = parts(tmp_path, bias=bias)
    tokens, states = history(19)
    pages = np.random.default_rng(0).permutation(PAGES)[:6].astype(np.int32)
    feed(memory, pages, tokens, states, cuts)
    query = memory.ask([0])[0]
    keys, wanted = expected(head, table, tokens, states)
    np.testing.assert_allclose(query[0], wanted, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(kept(memory, pages, 19)[..., :6].swapaxes(0, 1), keys, rtol=1e-2, atol=1e-2)


def test_scores_are_the_attention_weights_with_the_group_maximum(tmp_path):
    head, table, memory, target = parts(tmp_path)
    tokens, states = history(30)
    pages = np.random.default_rng(0).permutation(PAGES)[:8].astype(np.int32)
    feed(memory, pages, tokens, states, [0, 21, 30])
    queries = memory.ask([0])[0]
    scores = HeadSelector(memory, target).score(View(0, 30, 1, 16, pages, queries))
    keys, query = expected(head, table, tokens, states)
    logits = np.einsum("gad,gnd->gan", query.reshape(2, 2, 6), keys) / np.sqrt(6)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).max(1)
    assert scores.shape == (1, 2, 30)
    np.testing.assert_allclose(np.exp(scores[0, :, 1:]), weights, rtol=0.05, atol=1e-3)
    assert (scores[0, :, 0] == scores[0].max(1)).all()


def test_what_is_kept_does_not_depend_on_company_or_cuts(tmp_path):
    _, _, memory, _ = parts(tmp_path)
    _, _, other, _ = parts(tmp_path)
    mine, theirs = history(23), history(17, seed=5)
    pages = np.arange(8, dtype=np.int32)
    feed(memory, pages, *mine, [0, 23])
    start = [0, 0]
    for a, b in ((7, 16), (8, 17), (23, 17)):
        gains = []
        for number, (tokens, states), place, stop in ((0, mine, pages, a), (1, theirs, pages + 10, b)):
            first = start[number]
            other.follow([Look(number, first, 1, place)])
            if stop > first:
                slots = slots_of(place, first, stop)
                gains.append(Gain(number, first, slots, tokens[first:stop], tokens[stop], None, states[:, first:stop]))
            start[number] = stop
        other.learn(gains)
    together = other.ask([1, 0])[1]
    np.testing.assert_array_equal(memory.ask([0])[0], together)
    np.testing.assert_array_equal(kept(memory, pages, 23), kept(other, pages, 23))


def test_a_sequence_behind_found_pages_goes_on_as_the_first_one_did(tmp_path):
    _, _, memory, _ = parts(tmp_path)
    tokens, states = history(22)
    first = np.arange(6, dtype=np.int32)
    feed(memory, first, tokens, states, [0, 22])
    cold, keys = memory.ask([0])[0], kept(memory, first, 22)
    memory.forget(0)
    second = np.array([0, 1, 2, 20, 21, 22], np.int32)  # three pages are found
    feed(memory, second, tokens, states, [12, 19, 22], sequence=7)
    np.testing.assert_array_equal(memory.ask([7])[0], cold)
    np.testing.assert_array_equal(kept(memory, second, 22), keys)


def test_what_a_sequence_takes_along_comes_back_in_other_slots(tmp_path):
    _, _, memory, _ = parts(tmp_path)
    tokens, states = history(21)
    pages, others = np.arange(6, dtype=np.int32), np.arange(20, 26, dtype=np.int32)
    feed(memory, pages, tokens, states, [0, 20, 21])
    held = memory.take(0, slots_of(pages, 10, 21))
    expected_query, keys = memory.ask([0])[0], kept(memory, pages, 21)
    memory.keys[:] = 0
    feed(memory, others, tokens, states, [0, 8, 10])  # computed again; the last two wait
    memory.put(slots_of(others, 10, 21), held)
    memory.follow([Look(0, 21, 1, others)])
    np.testing.assert_array_equal(memory.ask([0])[0], expected_query)
    np.testing.assert_array_equal(kept(memory, others, 21), keys)


def test_without_the_state_behind_there_is_no_query(tmp_path):
    _, _, memory, target = parts(tmp_path)
    pages = np.arange(6, dtype=np.int32)
    memory.follow([Look(0, 6, 1, pages)])  # in the middle of a page: nobody kept its state
    assert memory.ask([0]) == [None]
    assert HeadSelector(memory, target).score(View(0, 6, 1, 4, pages)) is None


def test_short_steps_are_fused_a_page_at_a_time(tmp_path, monkeypatch):
    _, _, memory, _ = parts(tmp_path)
    tokens, states = history(33)
    sizes = []
    fuse = memory._fuse
    monkeypatch.setattr(memory, "_fuse", lambda ids, ask: (sizes.append(len(ids)), fuse(ids, ask)))
    feed(memory, np.arange(9, dtype=np.int32), tokens, states, list(range(33)))
    assert sum(sizes) == 8


@pytest.mark.parametrize(("own", "target", "shape"), [(4, 2, (1, 2, 9)), (2, 4, (1, 4, 9)), (1, 2, (1, 2, 9))])
def test_other_numbers_of_kv_heads(tmp_path, own, target, shape):
    _, _, memory, _ = parts(tmp_path, kv_heads=own)
    tokens, states = history(9)
    pages = np.arange(3, dtype=np.int32)
    feed(memory, pages, tokens, states, [0, 9])
    spec = DecoderSpec("scripted", VOCABULARY, 24, 8, 4, target, 6, 32, 256)
    view = View(0, 9, 1, 4, pages, memory.ask([0])[0])
    assert HeadSelector(memory, spec).score(view).shape == shape


def test_heads_that_do_not_fit_are_refused(tmp_path):
    _, _, memory, _ = parts(tmp_path)
    with pytest.raises(ModelError, match="select by pages"):
        HeadSelector(memory, DecoderSpec("scripted", VOCABULARY, 24, 8, 6, 3, 6, 32, 256))


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [2, 6])
def test_compiled_scores_are_the_reference(dim, heads):
    rng = np.random.default_rng(0)
    length, pages = 300, rng.permutation(90)[:75].astype(np.int32)
    values = rng.normal(size=(90, 2, PAGE, dim)).astype(np.float32)
    keys = to_bfloat16(values)
    query = rng.normal(size=(heads, dim)).astype(np.float32) / 4
    slots = slots_of(pages, 0, length)
    rows = (keys.astype(np.uint32) << 16).view(np.float32)[slots // PAGE, :, slots % PAGE]
    logits = np.einsum("gad,ngd->gan", query.reshape(2, -1, dim), rows[1:])
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (shifted / shifted.sum(-1, keepdims=True)).max(1)
    scores = score_entries(query, keys, pages, length)
    np.testing.assert_allclose(np.exp(scores[:, 1:]), weights, rtol=2e-3)


@pytest.mark.parametrize("short", [False, True])
def test_rows_are_multiplied_alike_alone_and_together(short):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 48)).astype(np.float32) for n in (70, 150))
    assert shorten(w) is w
    if short:
        w = (to_bfloat16(w).astype(np.uint32) << 16).view(np.float32)
    whole = project(x, shorten(w), None)
    assert (shorten(w).dtype == np.uint16) == short
    np.testing.assert_allclose(whole, x @ w.T, rtol=1e-4, atol=1e-4)
    for row in (0, 33, 69):
        np.testing.assert_array_equal(project(x[row : row + 1], shorten(w), None)[0], whole[row])


def test_contexts_beyond_the_training_length_are_reached_by_yarn():
    short = Rope(theta=10000.0)
    assert extend(short, 2048, 2048) == short
    longer = extend(short, 2048, 8000)
    assert (longer.kind, longer.scaling["factor"]) == ("yarn", 4.0)
    scaled = Rope(kind="linear", scaling={"factor": 2.0})
    assert extend(scaled, 2048, 8000) == scaled
    fast, slow = (rope_tables(rope, 64, [2000])[0] for rope in (short, longer))
    assert not np.allclose(fast, slow, atol=0.05)


def test_embeddings_unpack_the_rows_that_are_asked_for():
    class Table(Dense):
        def part(self, first, last):
            read.append((first, last))
            return Dense(self.values[first:last])

        def release(self):
            pass

    read: list[tuple[int, int]] = []
    values = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    rows = Embeddings(Table(values)).rows([3, 8, 3])
    np.testing.assert_array_equal(rows, values[[3, 8, 3]])
    assert read == [(3, 4), (8, 9)]


def test_selectors_are_named_as_drafters_are(tmp_path):
    assert read_selector("pages") == Choice("pages")
    assert read_selector(str(tmp_path)) == Choice("head", str(tmp_path))
    assert read_selector({"name": "head", "path": "x"}) == Choice("head", "x")
    for wrong, words in (
        ("page", "did you mean 'pages'"),
        ("head", "needs a path"),
        ({"name": "head"}, "needs a path"),
        ({"name": "head", "paths": "x"}, "path"),
        ({"name": "window", "path": "x"}, "path"),
        (3, "is refused"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_selector(wrong)
