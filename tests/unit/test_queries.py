"""What selection is shown of a forward pass, and what the caches give and take: compiled and reference alike."""

from __future__ import annotations

import numpy as np
import pytest

from compiling import WIRINGS, Feeder, random_weights, spec_of
from outrider.errors import ConfigError
from outrider.models.compiled import CompiledDecoder
from outrider.models.decoder import ReferenceDecoder

TOKENS = np.random.default_rng(3).integers(0, 101, 40)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_compiled_decoder_shows_the_references_queries(wiring: str, kv: str) -> None:
    spec = spec_of(wiring)
    weights = random_weights(spec)
    compiled = CompiledDecoder.build(spec, weights, dtype="float32", kv_dtype=kv, threads=2)
    reference = ReferenceDecoder.build(spec, weights)
    seen = []
    for decoder in (compiled, reference):
        feeder = Feeder(decoder)
        assert feeder.feed({0: TOKENS[:30]}).queries is None
        decoder.retap_queries((1, 0))
        seen.append(feeder.feed({0: TOKENS[30:]}).queries)
    assert seen[0].shape == (2, 10, spec.num_heads, spec.head_dim)
    np.testing.assert_allclose(seen[0][1], seen[1][1], atol=2e-3)  # layer 0, second: KV types play no part
    np.testing.assert_allclose(seen[0][0], seen[1][0], atol=0.2 if kv != "float32" else 2e-3)
    assert np.abs(seen[1][0] - seen[1][1]).max() > 0.1


@pytest.mark.parametrize("make", [CompiledDecoder, ReferenceDecoder])
def test_queries_are_those_of_the_logit_rows_and_have_no_scale(make) -> None:
    spec = spec_of("llama")
    decoder = make.build(spec, random_weights(spec), dtype="float32")
    decoder.retap_queries((1,))
    every = Feeder(decoder).feed({0: TOKENS[:12]}).queries
    feeder = Feeder(decoder)
    batch = feeder.batch({0: TOKENS[:12]})
    picked = decoder.forward(type(batch)(**{**vars(batch), "logit_rows": np.array([3, 11], np.int32)}), feeder.cache)
    np.testing.assert_array_equal(picked.queries, every[:, [3, 11]])
    with pytest.raises(ConfigError, match="not layers"):
        decoder.retap_queries((2,))


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("make", [CompiledDecoder, ReferenceDecoder])
def test_rows_that_are_taken_come_back_bit_for_bit(make, kv: str) -> None:
    spec = spec_of("llama")
    decoder = make.build(spec, random_weights(spec), dtype="float32", kv_dtype=kv)
    feeder = Feeder(decoder, page_size=4)
    feeder.feed({0: TOKENS[:22]})
    slots = feeder.slots(0, np.arange(5, 22))
    keys, rows = feeder.cache.key_rows((1,), slots)[0], feeder.cache.take(slots)
    assert keys.shape == (17, spec.num_kv_heads, spec.head_dim)
    wanted = decoder.forward(feeder.batch({0: [5]}), feeder.cache).logits
    free = feeder.slots(0, np.arange(40, 57))
    feeder.cache.put(free, rows)
    np.testing.assert_array_equal(feeder.cache.key_rows((1,), free)[0], keys)
    feeder.cache.put(slots, feeder.cache.take(feeder.slots(0, np.arange(60, 77))))
    assert (decoder.forward(feeder.batch({0: [5]}), feeder.cache).logits != wanted).any()
    feeder.cache.put(slots, feeder.cache.take(free))
    np.testing.assert_array_equal(decoder.forward(feeder.batch({0: [5]}), feeder.cache).logits, wanted)
