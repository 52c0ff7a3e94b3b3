"""The reference kernels and its cache: visibility, selections, stored types, page copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiling import Stored
from outrider.errors import ConfigError, ModelError
from outrider.kernels import reference as ops
from outrider.models.build import build_decoder
from outrider.models.decoder import ReferenceDecoder
from outrider.models.families import expected_shapes
from outrider.models.spec import DecoderSpec
from outrider.types import Batch, Selection

SPEC = DecoderSpec(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=128,
)
PAGE = 4


def noise(shape: tuple[int, ...], seed: int) -> Stored:
    """A random weight."""
    scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
    return Stored(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * scale)


WEIGHTS = {name: noise(shape, i) for i, (name, shape) in enumerate(expected_shapes(SPEC, 32).items())}
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]


def decoder(**options) -> ReferenceDecoder:
    return ReferenceDecoder.build(SPEC, WEIGHTS, **options)


def batch(tokens, context=0, ancestors=None, selection=None, **changes) -> Batch:
    """One sequence on pages 0, 1, 2, ... in order."""
    rows = np.arange(len(tokens), dtype=np.int32)
    fields = {
        "tokens": np.array(tokens, dtype=np.int32),
        "positions": rows + context,
        "slots": rows + context,
        "row_starts": np.array([0, len(tokens)], dtype=np.int32),
        "contexts": np.array([context], dtype=np.int32),
        "pages": np.arange(8, dtype=np.int32)[None],
        "logit_rows": rows,
        "ancestors": ancestors,
        "selection": selection,
    }
    return Batch(**{**fields, **changes})


def logits(model, tokens=TOKENS, split=6, selection=None) -> np.ndarray:
    """Logits of the rows behind a committed prefix of `split` tokens."""
    cache = model.new_cache(8, PAGE)
    model.forward(batch(tokens[:split]), cache)
    return model.forward(batch(tokens[split:], split, selection=selection), cache).logits


def selection(entries: list[list[int]], counts=None) -> Selection:
    """The same entries for both layers, one list per KV head."""
    width = max(map(len, entries))
    table = np.array([[[row + [0] * (width - len(row)) for row in entries]]], dtype=np.int32)
    numbers = [[[len(row) for row in entries]]] if counts is None else counts
    return Selection(table, np.array(numbers, dtype=np.int32), np.zeros(2, dtype=np.int32))


def test_visible_rows_of_a_chain_a_window_and_a_tree():
    chain = ops.visible(batch([1, 2, 3], context=2), 0, 1, None, 0)[:, 0]
    assert chain.astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    window = ops.visible(batch([1, 2, 3], context=2), 0, 1, 2, 0)[:, 0]
    assert window.astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    bits = np.array([0b001, 0b011, 0b101], dtype=np.uint64)
    depths = np.array([2, 3, 3], dtype=np.int32)
    tree = ops.visible(batch([1, 2, 3], 2, bits, positions=depths), 0, 1, 3, 0)[:, 0]
    assert tree.astype(int).tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 1]]


def test_causal_rows_beside_trees():
    count = 70
    reads = ops.visible(batch([1] * count, ancestors=np.full(count, ops.CAUSAL)), 0, 1, None, 0)
    assert np.array_equal(reads[:, 0], np.tri(count, dtype=bool))
    hasty = np.array([0b111, 0b010, 0b101], dtype=np.uint64)
    tree = ops.visible(batch([1, 2, 3], ancestors=hasty), 0, 1, None, 0)[:, 0]
    assert tree.astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]], "no row reads a later one"


def test_best_stays_below_the_ids_that_text_can_stand_for():
    best = decoder().forward(batch(TOKENS), decoder().new_cache(8, PAGE)).best
    limit = int(best.max())
    short = ReferenceDecoder.build(DecoderSpec(**{**SPEC.__dict__, "num_tokens": limit}), WEIGHTS)
    result = short.forward(batch(TOKENS), short.new_cache(8, PAGE))
    assert result.best.max() < limit
    assert result.logits.shape == (len(TOKENS), SPEC.vocab_size)
    assert np.array_equal(result.best, result.logits[:, :limit].argmax(-1))


def test_selecting_everything_is_bitwise_full_attention():
    model = decoder()
    everything = selection([list(range(6))] * 2)
    assert np.array_equal(logits(model, selection=everything), logits(model))
    unlimited = selection([[0]] * 2, counts=[[[-1, -1]]])
    assert np.array_equal(logits(model, selection=unlimited), logits(model))


def test_a_selection_narrows_each_kv_head_by_itself():
    reads = ops.visible(batch([1, 2], 4, selection=selection([[0, 3], [1]])), 0, 2, None, 0)
    assert reads[1].astype(int).tolist() == [[1, 0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1]]
    model = decoder()
    narrow = logits(model, selection=selection([[0, 3], [1]]))
    assert not np.allclose(narrow, logits(model), atol=1e-3)


def test_a_selection_equals_a_sequence_without_the_other_entries():
    """One layer, all heads alike: reading entries 1 and 4 is having only those, at their true positions."""
    spec = DecoderSpec(**{**SPEC.__dict__, "num_layers": 1})
    model = ReferenceDecoder.build(spec, {n: w for n, w in WEIGHTS.items() if not n.startswith("layers.1")})
    chosen = Selection(
        np.array([[[[1, 4]] * 2]], dtype=np.int32), np.full((1, 1, 2), 2, dtype=np.int32), np.zeros(1, int)
    )
    cache = model.new_cache(8, PAGE)
    short = np.array([TOKENS[1], TOKENS[4]])
    model.forward(batch(short, positions=np.array([1, 4], dtype=np.int32)), cache)
    last = batch(TOKENS[6:7], 2, positions=np.array([6], dtype=np.int32))
    assert np.array_equal(model.forward(last, cache).logits, logits(model, TOKENS[:7], selection=chosen))


@pytest.mark.parametrize(("kv_dtype", "error"), [("bfloat16", 0.05), ("float16", 0.01), ("int8", 0.05)])
def test_stored_types_are_close_and_do_not_depend_on_the_cut(kv_dtype, error):
    model = decoder(kv_dtype=kv_dtype)
    exact, ours = logits(decoder()), logits(model)
    assert 0 < np.abs(ours - exact).max() < error * np.abs(exact).max()
    assert np.array_equal(logits(model, split=1)[5:], ours)
    assert model.kv_bytes_per_token() < decoder().kv_bytes_per_token()


def test_int8_codec_keeps_zero_and_the_largest_value():
    x = torch.tensor([[0.0, 0.0], [-3.0, 1.5]])
    back = ops_codec().decode(ops_codec().encode(x), torch.float32)
    assert torch.allclose(back, x, atol=3 / 127)
    assert back[0].tolist() == [0.0, 0.0]


def ops_codec():
    return decoder(kv_dtype="int8").new_cache(1, 1).codec


def test_move_carries_every_layer():
    model = decoder(kv_dtype="int8")
    cache = model.new_cache(8, PAGE)
    model.forward(batch(TOKENS), cache)
    slots = torch.arange(8 * PAGE)
    before = [cache.read(layer, slots, torch.float32) for layer in range(2)]
    cache.move(1, 30)
    for layer, (k, v) in enumerate(before):
        now = cache.read(layer, slots, torch.float32)
        for old, new in ((k, now[0]), (v, now[1])):
            assert torch.equal(new[30], old[1])
            assert torch.equal(new[:12], old[:12])
    assert before[0][0][0].abs().sum() > 0


def test_all_rows_at_once_is_nearly_row_by_row():
    """What accelerators run: one product over all rows, one masked attention."""
    together = decoder()
    together.rows = ops.AllRows()
    bits = np.array([0b00001, 0b00011, 0b00101, 0b01001, 0b11001], dtype=np.uint64)
    chosen = selection([[0, 3], [1, 2]])
    results = []
    for model in (decoder(), together):
        cache = model.new_cache(8, PAGE)
        model.forward(batch(TOKENS[:6]), cache)
        results.append(model.forward(batch(TOKENS[6:], 6, bits, chosen), cache).logits)
    assert np.allclose(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_stay_near_fp32(dtype):
    exact, ours = logits(decoder()), logits(decoder(dtype=dtype))
    assert ours.dtype == np.float32
    assert 0 < np.abs(ours - exact).max() < 0.1 * np.abs(exact).max()


def test_a_pass_without_logit_rows_only_writes():
    model = decoder(taps=(1,))
    cache = model.new_cache(8, PAGE)
    result = model.forward(batch(TOKENS, logit_rows=np.zeros(0, dtype=np.int32)), cache)
    assert result.best.shape == (0,)
    assert result.logits.shape == (0, SPEC.vocab_size)
    assert result.features.shape == (1, len(TOKENS), SPEC.hidden_size)
    assert model.forward(batch(TOKENS, want_logits=False), cache).logits is None


def test_options_are_refused_by_name():
    for options, field in (
        ({"dtype": "int3"}, "dtype"),
        ({"kv_dtype": "int3"}, "kv_cache_dtype"),
        ({"taps": (2,)}, "taps"),
    ):
        with pytest.raises(ConfigError) as caught:
            decoder(**options)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="device = 'tpu'"):
        build_decoder(SPEC, WEIGHTS, device="tpu")
    with pytest.raises(ConfigError, match="backend"):
        build_decoder(SPEC, WEIGHTS, backend="fast")
    with pytest.raises(ModelError, match="lack lm_head"):
        build_decoder(DecoderSpec(**{**SPEC.__dict__, "tied": False}), WEIGHTS, backend="reference")


def test_build_gives_the_reference_when_asked():
    model = build_decoder(SPEC, WEIGHTS, device="cpu", backend="reference")
    assert isinstance(model, ReferenceDecoder)
    assert model.weight_bytes == sum(w.values.nbytes for w in WEIGHTS.values())
    assert model.kv_bytes_per_token() == 2 * 2 * 2 * 8 * 4
