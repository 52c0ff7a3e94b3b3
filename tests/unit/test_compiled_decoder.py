"""The compiled decoder computes what the reference decoder computes, for every wiring and type."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from compiling import BASE, WIRINGS, Feeder, Stored, random_weights, spec_of
from outrider.errors import ConfigError, ModelError, RequestError
from outrider.models.build import build_decoder
from outrider.models.compiled import CompiledDecoder
from outrider.models.decoder import ReferenceDecoder
from outrider.models.spec import DecoderSpec, Rope

TOKENS = np.random.default_rng(3).integers(0, 101, 150)


def both(spec: DecoderSpec, dtype: str = "float32", kv: str = "float32", taps: tuple[int, ...] = ()):
    weights = random_weights(spec)
    compiled = CompiledDecoder.build(spec, weights, dtype=dtype, kv_dtype=kv, threads=2, taps=taps)
    reference = ReferenceDecoder.build(spec, weights, dtype="float32", device="cpu", kv_dtype="float32", taps=taps)
    return Feeder(compiled), Feeder(reference)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_fp32_agrees_with_the_reference(wiring):
    compiled, reference = both(spec_of(wiring), taps=(1, 0))
    one, other = compiled.feed({0: TOKENS}), reference.feed({0: TOKENS})
    np.testing.assert_allclose(one.logits, other.logits, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(one.features, other.features, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(one.best, one.logits.argmax(1))


@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0, "linear", {"factor": 4.0}),
        Rope(
            500000.0,
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        Rope(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    ],
    ids=lambda rope: rope.kind,
)
def test_scaled_rotations_agree_with_the_reference(rope):
    compiled, reference = both(replace(spec_of("llama"), rope=rope))
    np.testing.assert_allclose(compiled.logits(TOKENS), reference.logits(TOKENS), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "kv", "most"), [("int8", "bfloat16", 0.03), ("int8", "int8", 0.05), ("int4", "int8", 0.3)]
)
@pytest.mark.parametrize("wiring", ["llama", "opt", "wide"])
def test_integers_stay_near_the_reference(wiring, dtype, kv, most):
    compiled, reference = both(spec_of(wiring), dtype, kv)
    one, other = compiled.logits(TOKENS), reference.logits(TOKENS)
    error = np.sqrt(((one - other) ** 2).mean() / (other**2).mean())
    assert 0 < error < most


def test_ties_go_to_the_lowest_token_with_and_without_logits():
    spec = spec_of("llama")
    weights = random_weights(spec)
    table = weights["embed"].values.copy()
    decoder = CompiledDecoder.build(spec, weights, threads=2)
    best = int(Feeder(decoder).feed({0: TOKENS[:9]}).best[-1])
    twin = (best + 50) % 101
    table[twin] = table[best]
    decoder = CompiledDecoder.build(spec, {**weights, "embed": Stored(table)}, threads=2)
    batch = Feeder(decoder).batch({0: [t for t in TOKENS[:9] if t != twin]})
    for want in (True, False):
        result = decoder.forward(replace(batch, want_logits=want), Feeder(decoder).cache)
        assert (result.logits is None) == (not want)
        assert result.best[-1] in (best, twin)
        assert result.best[-1] == min(best, twin)


def test_logit_rows_choose_which_rows_are_read_out():
    decoder = CompiledDecoder.build(spec_of("llama"), random_weights(spec_of("llama")), threads=2)
    feeder = Feeder(decoder)
    batch = feeder.batch({0: TOKENS[:30]})
    whole = decoder.forward(batch, feeder.cache)
    for rows in ([29], [0, 7, 29], []):
        part = decoder.forward(replace(batch, logit_rows=np.array(rows, np.int32)), feeder.cache)
        np.testing.assert_array_equal(part.logits, whole.logits[rows])
        np.testing.assert_array_equal(part.best, whole.best[rows])


def test_nan_weights_show_in_the_logits():
    spec = spec_of("llama")
    weights = random_weights(spec)
    norm = weights["layers.0.mlp_norm"].values.copy()
    norm[3] = np.nan
    weights["layers.0.mlp_norm"] = Stored(norm)
    for dtype in ("float32", "int8", "int4"):
        decoder = CompiledDecoder.build(spec, weights, dtype=dtype, threads=1)
        assert np.isnan(Feeder(decoder).logits(TOKENS[:5])).all()


def test_layers_can_be_waited_for_one_by_one():
    spec = spec_of("llama")
    decoder = CompiledDecoder.build(spec, random_weights(spec), threads=2)
    feeder, seen = Feeder(decoder), []
    batch = feeder.batch({0: TOKENS[:20]})
    whole = decoder.forward(batch, feeder.cache).logits
    steps = decoder.forward(batch, feeder.cache, before_layer=seen.append).logits
    assert seen == [0, 1]
    np.testing.assert_array_equal(whole, steps)


def test_a_step_reads_one_row_of_an_embedding_that_is_no_output_matrix():
    for tied in (True, False):
        spec = replace(spec_of("llama"), tied=tied)
        weights = random_weights(spec)
        for build in (CompiledDecoder.build, ReferenceDecoder.build):
            decoder = build(spec, weights, dtype="float32")
            skipped = decoder.weight_bytes - decoder.step_bytes
            dense = 0 if tied else (spec.vocab_size - 1) * spec.hidden_size * 4
            assert dense <= skipped <= 1.6 * dense  # packed matrices are padded to whole tiles


def test_slots_can_be_copied():
    spec = spec_of("llama")
    for kv in ("float32", "bfloat16", "int8"):
        decoder = CompiledDecoder.build(spec, random_weights(spec), kv_dtype=kv, threads=1)
        feeder = Feeder(decoder, page_size=4)
        feeder.feed({0: TOKENS[:8]})
        wanted = decoder.forward(feeder.batch({0: [5]}), feeder.cache).logits
        pages = feeder.pages[0]
        for source, target in ((pages[0], pages[9]), (pages[1], pages[8])):
            for offset in range(4):
                feeder.cache.move(int(source) * 4 + offset, int(target) * 4 + offset)
        for array in (feeder.cache.keys[0], feeder.cache.values[1]):
            array[pages[:2]] = 0
        feeder.pages[0, :2] = pages[9], pages[8]
        np.testing.assert_array_equal(decoder.forward(feeder.batch({0: [5]}), feeder.cache).logits, wanted)


def test_two_decoders_and_several_callers_do_not_disturb_each_other():
    spec = spec_of("llama")
    decoders = [CompiledDecoder.build(spec, random_weights(spec, seed), threads=2) for seed in (0, 1)]
    wanted = [Feeder(decoder).logits(TOKENS[:40]) for decoder in decoders]
    found = {}

    def call(number: int) -> None:
        cuts = range(1, 40)
        found[number] = Feeder(decoders[number % 2]).logits(TOKENS[:40], cuts)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for number in range(4):
        np.testing.assert_array_equal(found[number], wanted[number % 2])


def test_what_cannot_run_is_refused():
    spec = spec_of("llama")
    weights = random_weights(spec)
    with pytest.raises(ModelError, match="reference decoder"):
        CompiledDecoder.build(replace(spec, norm_first=False), weights)
    with pytest.raises(ModelError, match="reference decoder"):
        CompiledDecoder.build(spec, {**weights, "project_in": weights["embed"]})
    with pytest.raises(ModelError, match=r"layers\.1\.down"):
        CompiledDecoder.build(spec, {k: v for k, v in weights.items() if k != "layers.1.down"})
    with pytest.raises(ConfigError, match="int7"):
        CompiledDecoder.build(spec, weights, dtype="int7")
    with pytest.raises(ConfigError, match="taps"):
        CompiledDecoder.build(spec, weights, taps=(2,))


def test_batches_that_point_outside_are_refused():
    decoder = CompiledDecoder.build(spec_of("llama"), random_weights(spec_of("llama")), threads=1)
    feeder = Feeder(decoder)
    batch = feeder.batch({0: [1, 2, 3]})
    for field, value in (("tokens", 101), ("slots", 400), ("pages", 50), ("positions", -1), ("logit_rows", 3)):
        bad = np.full_like(getattr(batch, field), value)
        with pytest.raises(RequestError, match=field):
            decoder.forward(replace(batch, **{field: bad}), feeder.cache)


def test_kv_bytes_are_those_of_the_cache():
    spec = DecoderSpec(**BASE)
    for kv in ("float32", "bfloat16", "int8"):
        decoder = CompiledDecoder.build(spec, random_weights(spec), kv_dtype=kv, threads=1)
        assert decoder.new_cache(3, 4).nbytes == 12 * decoder.kv_bytes_per_token()


def test_a_drafter_is_packed_in_the_fewest_bits():
    spec = spec_of("llama")
    weights = random_weights(spec)
    auto, fewest = (build_decoder(spec, weights, dtype=dtype, device="cpu") for dtype in ("auto", "fewest"))
    assert fewest.weight_bytes < 0.7 * auto.weight_bytes
    reference = build_decoder(spec, weights, dtype="fewest", device="cpu", backend="reference")
    assert isinstance(reference, ReferenceDecoder)
