"""Scores and weighted sums over scattered rows of every KV type, and how rows are stored."""

import numpy as np
import pytest

from outrider.kernels.cpu import vectors
from outrider.kernels.cpu.attention import part_row, store_row
from outrider.kernels.cpu.many import mix_many, scores_many
from outrider.kernels.cpu.workspace import address

KINDS = [vectors.FLOAT32, vectors.BFLOAT16, vectors.INT8]
DIMS = [16, 48, 64, 80, 128]
ROWS = 96


def pool(kind: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows in a cache's type, their scales, and the values that they stand for."""
    source = np.random.default_rng(dim).normal(size=(ROWS, dim)).astype(np.float32)
    data = np.zeros((ROWS, dim), [np.float32, np.uint16, np.int8][kind])
    scales = np.zeros(ROWS, np.float32)
    for row in range(ROWS):
        store_row(kind, address(source[row]), dim, address(data), address(scales), row)
    if kind == vectors.BFLOAT16:
        return data, scales, (data.astype(np.uint32) << 16).view(np.float32)
    return data, scales, data * (scales[:, None] if kind == vectors.INT8 else np.float32(1))


def parted(x: np.ndarray) -> np.ndarray:
    """Even values, then odd ones, of every 32."""
    blocks = x.reshape(*x.shape[:-1], -1, 16, 2)
    return np.ascontiguousarray(blocks.swapaxes(-1, -2)).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
def test_scores_are_dot_products_with_the_named_rows(kind, dim):
    data, scales, values = pool(kind, dim)
    entries = np.random.default_rng(0).integers(0, ROWS, 48)
    query = np.random.default_rng(1).normal(size=dim).astype(np.float32)
    order = parted(query) if vectors.is_parted(kind, dim) else query
    out = np.full(48, 9, np.float32)
    vectors.scores(kind, *map(address, (order, data, scales, entries)), 37, dim, address(out))
    np.testing.assert_allclose(out[:37], values[entries[:37]] @ query, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 3, 5, 17])
def test_scores_of_many_queries_are_those_of_each_alone(kind, dim, queries):
    data, scales, _ = pool(kind, dim)
    entries = np.random.default_rng(0).integers(0, ROWS, 64)
    query = np.random.default_rng(1).normal(size=(queries, dim)).astype(np.float32)
    alone, together = (np.zeros((queries, 64), np.float32) for _ in range(2))
    for j in range(queries):
        vectors.scores(kind, *map(address, (query[j], data, scales, entries)), 64, dim, address(alone[j]))
    flat = np.zeros(16 * dim, np.float32)
    scores_many(
        *(kind, address(query), queries, *map(address, (data, scales, data, entries))),
        *(64, dim, address(flat), address(together), together.strides[0]),
    )
    assert np.abs(alone).min() > 0
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
def test_mixes_do_not_depend_on_the_queries_beside_them(kind, dim):
    data, scales, values = pool(kind, dim)
    entries = np.random.default_rng(0).integers(0, ROWS, 40)
    weights = np.random.default_rng(2).random((4, 40), dtype=np.float32)

    def mix(queries: int, first: int = 0) -> np.ndarray:
        out = np.zeros((queries, dim), np.float32)
        vectors.mix(
            *(kind, queries, address(weights[first]), weights.strides[0]),
            *(*map(address, (data, scales, entries)), 37, dim, address(out), out.strides[0]),
        )
        return out

    whole = mix(4)
    real = weights[:, :37] @ values[entries[:37]]
    np.testing.assert_allclose(whole, parted(real) if vectors.is_parted(kind, dim) else real, rtol=1e-5, atol=1e-5)
    for first in range(4):
        np.testing.assert_array_equal(mix(1, first)[0], whole[first])
    np.testing.assert_array_equal(mix(3), whole[:3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 4, 6])
def test_mixes_of_many_queries_are_those_of_each_alone(kind, dim, queries):
    data, scales, _ = pool(kind, dim)
    entries = np.random.default_rng(0).integers(0, ROWS, 48)
    weights = np.random.default_rng(2).random((queries, 48), dtype=np.float32)
    alone, together = (np.zeros((queries, dim), np.float32) for _ in range(2))
    for j in range(queries):
        vectors.mix(
            *(kind, 1, address(weights[j]), 0, *map(address, (data, scales, entries)), 48, dim, address(alone[j]), 0)
        )
    mix_many(
        *(kind, queries, address(weights), weights.strides[0], *map(address, (data, scales, entries)), 48, dim),
        *(address(data), address(entries), address(together), together.strides[0]),
    )
    assert np.abs(alone).min() > 0
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_row_is_scored_alike_at_every_place(dim):
    data, scales, _ = pool(vectors.BFLOAT16, dim)
    query = np.random.default_rng(1).normal(size=dim).astype(np.float32)
    entries, out = np.full(32, 5), np.zeros(32, np.float32)
    vectors.scores(vectors.BFLOAT16, *map(address, (query, data, scales, entries)), 32, dim, address(out))
    assert len(set(out.tolist())) == 1


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    import torch

    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    x[: len(bits)] = np.array(bits, np.uint32).view(np.float32)
    x[10] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
    data, none = np.zeros((1, 64), np.uint16), np.zeros(1, np.float32)
    store_row(vectors.BFLOAT16, address(x), 64, address(data), address(none), 0)
    real = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(x)
    np.testing.assert_array_equal(data[0][~nan], real[~nan])
    assert np.isnan((data[0][nan].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_int8_rows_show_nan_and_infinity(bad):
    x = np.ones(16, np.float32)
    x[3] = bad
    data, scales = np.zeros((1, 16), np.int8), np.zeros(1, np.float32)
    store_row(vectors.INT8, address(x), 16, address(data), address(scales), 0)
    assert not np.isfinite(scales[0])


def test_parting_puts_even_values_first():
    x, spare = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    part_row(address(x), address(spare), 64)
    np.testing.assert_array_equal(x, parted(np.arange(64, dtype=np.float32)))
