"""A row's bits depend on nothing but its own tokens: not on batch, chunks, threads, tree or instruction path."""

import numpy as np
import pytest

from compiling import WIRINGS, Feeder, random_weights, spec_of
from outrider.kernels.cpu.isa import available
from outrider.models.compiled import CompiledDecoder
from outrider.types import Selection

TOKENS = np.random.default_rng(3).integers(0, 101, 300)
DTYPES = [("float32", "float32"), ("int8", "bfloat16"), ("int4", "int8")]


def build(wiring: str = "llama", dtype: str = "int8", kv: str = "bfloat16", threads: int = 2) -> CompiledDecoder:
    spec = spec_of(wiring)
    return CompiledDecoder.build(spec, random_weights(spec), dtype=dtype, kv_dtype=kv, threads=threads)


@pytest.mark.parametrize(("dtype", "kv"), DTYPES)
@pytest.mark.parametrize("wiring", WIRINGS)
def test_chunks_change_no_bit(wiring, dtype, kv):
    decoder = build(wiring, dtype, kv)
    whole = Feeder(decoder).logits(TOKENS)
    for cuts in (range(1, 300, 17), [1, 2, 4, 9, 137, 140, 290, 299], [128, 256]):
        np.testing.assert_array_equal(Feeder(decoder).logits(TOKENS, cuts), whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    wanted = Feeder(build(threads=2)).logits(TOKENS)
    decoder = build(threads=threads)
    for cuts in ((), [1, 2, 4, 9, 140, 290, 299]):
        np.testing.assert_array_equal(Feeder(decoder).logits(TOKENS, cuts), wanted)


@pytest.mark.parametrize(("dtype", "kv"), DTYPES)
@pytest.mark.parametrize("path", available())
def test_paths_change_no_bit(monkeypatch, path, dtype, kv):
    wanted = Feeder(build("wide", dtype, kv)).logits(TOKENS[:150], [140, 141, 146])
    monkeypatch.setenv("OUTRIDER_CPU", path)
    decoder = build("wide", dtype, kv)
    assert decoder.path == path
    np.testing.assert_array_equal(Feeder(decoder).logits(TOKENS[:150], [140, 141, 146]), wanted)


@pytest.mark.parametrize("wiring", ["llama", "windows", "wide"])
def test_other_sequences_change_no_bit(wiring):
    decoder = build(wiring)
    texts = [TOKENS[:150], TOKENS[40:43], TOKENS[7:40], TOKENS[100:109]]
    alone = [Feeder(decoder).logits(text) for text in texts]
    together = Feeder(decoder, sequences=4)
    found = [[] for _ in texts]
    at = [0] * 4
    for turn in range(40):
        rows = {}
        for s, text in enumerate(texts):
            piece = text[at[s] : at[s] + (1 + (turn + 3 * s) % 7)]
            if len(piece):
                rows[s] = piece
        if not rows:
            break
        result, start = together.feed(rows), 0
        for s, piece in rows.items():
            found[s].append(result.logits[start : start + len(piece)])
            at[s] += len(piece)
            start += len(piece)
    for s, pieces in enumerate(found):
        np.testing.assert_array_equal(np.concatenate(pieces), alone[s])


@pytest.mark.parametrize("context", [3, 125, 127, 131])
@pytest.mark.parametrize("wiring", ["llama", "opt", "windows", "wide"])
def test_every_path_of_a_tree_equals_its_chain(wiring, context):
    decoder = build(wiring)
    parents = [-1, 0, 0, 1, 2, 2, 3, 5, -1]
    nodes = TOKENS[200:209]
    tree = Feeder(decoder, sequences=2)
    tree.feed({0: TOKENS[:context], 1: TOKENS[5:50]})
    logits = tree.feed({0: nodes, 1: TOKENS[50:53]}, parents={0: parents}).logits
    beside = Feeder(decoder).logits(TOKENS[5:53], [45])
    np.testing.assert_array_equal(logits[9:], beside[45:])
    for leaf in (6, 4, 7, 8):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        text = np.concatenate([TOKENS[:context], nodes[path]])
        np.testing.assert_array_equal(logits[path], Feeder(decoder).logits(text, [context])[context:])


def chosen(feeder: Feeder, entries: list[int], heads: int, layers: int) -> Selection:
    array = np.tile(np.array(entries, np.int32), (1, 1, heads, 1))
    counts = np.full((1, 1, heads), len(entries), np.int32)
    return Selection(array, counts, np.zeros(layers, np.int32))


@pytest.mark.parametrize("wiring", ["llama", "windows", "wide"])
def test_a_selection_of_everything_equals_full_attention(wiring):
    decoder = build(wiring)
    heads = decoder.spec.num_kv_heads
    full, picked = Feeder(decoder), Feeder(decoder)
    for feeder in (full, picked):
        feeder.feed({0: TOKENS[:200]})
    wanted = full.feed({0: TOKENS[200:205]}).logits
    selection = chosen(picked, list(range(200)), heads, 2)
    np.testing.assert_array_equal(picked.feed({0: TOKENS[200:205]}, selection=selection).logits, wanted)
    none = Selection(selection.entries, np.full_like(selection.counts, -1), selection.groups)
    picked.lengths[0] = 200
    np.testing.assert_array_equal(picked.feed({0: TOKENS[200:205]}, selection=none).logits, wanted)


@pytest.mark.parametrize("wiring", ["llama", "wide"])
def test_a_selection_reads_only_what_it_names(wiring):
    decoder = build(wiring)
    feeder = Feeder(decoder)
    feeder.feed({0: TOKENS[:200]})
    entries = [0, 1, 2, 3, *range(20, 190), 198, 199]  # more than a chunk
    chosen_ones = chosen(feeder, entries, decoder.spec.num_kv_heads, 2)
    batch = feeder.batch({0: TOKENS[200:203]}, selection=chosen_ones)
    before = decoder.forward(batch, feeder.cache).logits
    full = decoder.forward(feeder.batch({0: TOKENS[200:203]}), feeder.cache).logits
    assert np.abs(before - full).max() > 0
    slots = feeder.slots(0, np.setdiff1d(np.arange(200), entries))
    for array in (*feeder.cache.keys, *feeder.cache.values):
        array[slots // 8, :, slots % 8] = 0x7FC0  # NaN
    np.testing.assert_array_equal(decoder.forward(batch, feeder.cache).logits, before)
    assert np.isnan(decoder.forward(feeder.batch({0: TOKENS[200:203]}), feeder.cache).logits).all()


def test_layer_groups_and_heads_have_their_own_selections():
    decoder = build(dtype="float32", kv="float32")
    feeder = Feeder(decoder)
    feeder.feed({0: TOKENS[:40]})
    full = chosen(feeder, list(range(40)), 2, 2)
    entries = np.concatenate([full.entries, full.entries])
    counts = np.concatenate([full.counts, full.counts])
    groups = np.array([0, 1], np.int32)
    wanted = decoder.forward(feeder.batch({0: [1]}), feeder.cache).logits
    same = decoder.forward(feeder.batch({0: [1]}, selection=Selection(entries, counts, groups)), feeder.cache).logits
    np.testing.assert_array_equal(same, wanted)
    results = []
    for group in range(2):
        for head in range(2):
            fewer = counts.copy()
            fewer[group, 0, head] = 20
            selection = Selection(entries, fewer, groups)
            results.append(decoder.forward(feeder.batch({0: [1]}, selection=selection), feeder.cache).logits)
    for i, one in enumerate(results):
        assert np.abs(one - wanted).max() > 0
        assert all(np.abs(one - other).max() > 0 for other in results[:i])
