"""The product on every path equals one written in numpy in the same order, bit for bit."""

import numpy as np
import pytest

from outrider.kernels.cpu import formats, isa, rows
from outrider.kernels.cpu.layout import PLANES
from outrider.kernels.cpu.machine import compiled
from outrider.kernels.cpu.pack import Packed, pack_dense, pack_groups
from outrider.kernels.cpu.product import multiply, product_address
from outrider.kernels.cpu.workspace import address
from unit.test_kernels_pack import dense, stored

KINDS = range(formats.Q4_F16, len(formats.NAMES))


@compiled
def run(product, kind, count, w, tile_bytes, tiles, bias, groups, x, stride, meta, plane, out, out_stride, add):
    for tile in range(tiles):
        at = bias + tile * 64 if bias != 0 else 0
        multiply(
            *(product, kind, count, w + tile * tile_bytes, at, groups, x, stride),
            *(meta, groups * 4, plane, out + tile * 64, out_stride, add),
        )


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 rows, and [planes, rows, groups] of scales, excess (as bits), sums and more."""
    count, k = x.shape
    q, meta = np.zeros((count, k), np.int8), np.zeros((PLANES, count, k // 32), np.float32)
    for r in range(count):
        rows.quantise_row(address(x[r]), k // 32, address(q[r]), address(meta[0, r]), meta.strides[0])
    return q, meta


def product(path: str, packed: Packed, x: np.ndarray, block: int, bias=None, out=None) -> np.ndarray:
    """x [rows, k] times the matrix, `block` rows at a time."""
    count, k = len(x), packed.groups * 32
    padded = np.zeros((count, k), np.float32)
    padded[:, : packed.k] = x
    q, meta = quantise(padded)
    add, tiles = out is not None, len(packed.data)
    result = np.zeros((count, tiles * 16), np.float32) if out is None else out.copy()
    source = padded if packed.kind == formats.F32 else q
    for r in range(0, count, block):
        n = min(block, count - r)
        run(
            *(product_address(path), packed.kind, n, address(packed.data), packed.data.shape[1], tiles),
            *(0 if bias is None else address(bias), packed.groups, address(source[r]), source.strides[0]),
            *(address(meta[0, r]), meta.strides[0], address(result[r]), result.strides[0], int(add)),
        )
    return result


def expected(ints, x: np.ndarray) -> np.ndarray:
    """The definition in product.py, one group after the other in fp32."""
    q, meta = quantise(x)
    total = np.zeros((len(x), len(ints.q)), np.float32)
    for g in range(x.shape[1] // 32):
        at = slice(32 * g, 32 * g + 32)
        dots, scale = integers(ints, q, at), ints.scale[:, g]
        if ints.factor is not None:
            scale = ints.factor[:, g // 8]
        with np.errstate(invalid="ignore"):
            total = total + dots.astype(np.float32) * (scale * meta[0, :, g, None])
            if ints.minimum is not None:
                total = total + ints.minimum[:, g] * meta[2, :, g, None]
    return total


def integers(ints, q: np.ndarray, at: slice) -> np.ndarray:
    """The exact integers of one group, [rows, channels]."""
    left, right = q[:, at].astype(np.int32), ints.q[:, at].astype(np.int32)
    if ints.factor is not None:
        both = slice(at.start // 16, at.stop // 16)
        counts = ints.scale[:, both] / ints.factor[:, at.start // 256, None]
        right = right * np.repeat(counts.astype(np.int32), 16, 1)
    return left @ right.T


def rough_rows(count: int, k: int) -> np.ndarray:
    """Rows with an outlier, zeros, denormals, huge and tiny values."""
    x = np.random.default_rng(1).normal(size=(count, k)).astype(np.float32)
    x[0, 5] = 1e4
    x[1] = 0
    x[2] *= 1e-40
    x[3, 32:64] *= 1e30
    x[4] *= 1e-25
    return x


@pytest.mark.parametrize("path", isa.available())
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_and_row_count_gives_the_defined_bits(path, kind):
    ints = stored(kind, 48, 256)
    packed, x = pack_groups(ints), rough_rows(11, 256)
    wanted = expected(ints, x)
    for block in range(1, 9):
        np.testing.assert_array_equal(product(path, packed, x, block), wanted)


@pytest.mark.parametrize("path", isa.available())
def test_extreme_integers_do_not_saturate(path):
    cases = (
        (formats.Q8_F16, 127),
        (formats.Q8_F16, -127),
        (formats.Q4_F16, 15),
        (formats.Q6_K, -32),
        (formats.Q6_K, 31),
    )
    for kind, value in cases:
        ints = stored(kind, 16, 256)
        ints.q[:] = value
        if ints.factor is not None:
            ints.scale[:] = -128 * np.repeat(ints.factor, 16, 1)
        for sign in (1, -1):
            x = np.full((8, 256), sign * 3.0, np.float32)
            np.testing.assert_array_equal(product(path, pack_groups(ints), x, 8), expected(ints, x))


@pytest.mark.parametrize("path", isa.available())
def test_dense_floats_add_inputs_in_order(path):
    rng = np.random.default_rng(2)
    w, x = rng.normal(size=(16, 64)).astype(np.float32), rng.normal(size=(9, 64)).astype(np.float32)
    wanted = np.zeros((9, 16), np.float32)
    for k in range(64):
        wanted = wanted + x[:, k, None] * w[:, k]
    for block in (1, 3, 8):
        np.testing.assert_array_equal(product(path, pack_dense(w), x, block), wanted)


def test_bias_and_addition():
    path, ints = isa.available()[-1], stored(formats.Q4_F16, 32, 64)
    rng = np.random.default_rng(3)
    x, old = rng.normal(size=(5, 64)).astype(np.float32), rng.normal(size=(5, 32)).astype(np.float32)
    bias = rng.normal(size=32).astype(np.float32)
    packed, plain = pack_groups(ints), expected(ints, x)
    np.testing.assert_array_equal(product(path, packed, x, 4, bias), plain + bias)
    np.testing.assert_array_equal(product(path, packed, x, 4, bias, old), old + (plain + bias))


@pytest.mark.parametrize("path", isa.available())
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_visible_in_their_row_only(path, bad):
    for kind in (formats.Q4_F16, formats.Q8_F16, formats.Q6_K):
        ints = stored(kind, 16, 256)
        x = np.random.default_rng(4).normal(size=(3, 256)).astype(np.float32)
        clean = product(path, pack_groups(ints), x, 3)
        x[1, 40] = bad
        result = product(path, pack_groups(ints), x, 3)
        assert not np.isfinite(result[1]).any()
        np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("path", isa.available())
def test_a_bad_factor_of_stored_weights_shows_in_its_channel_only(path):
    ints = stored(formats.Q6_K, 16, 256)
    ints.factor[5] = np.nan
    ints.factor[6] = np.inf
    result = product(path, pack_groups(ints), np.ones((2, 256), np.float32), 2)
    np.testing.assert_array_equal(np.isfinite(result), np.tile(~np.isin(np.arange(16), (5, 6)), (2, 1)))


def test_the_product_is_close_to_the_real_one():
    for kind in KINDS:
        ints = stored(kind, 32, 512)
        x = np.random.default_rng(5).normal(size=(4, 512)).astype(np.float32)
        real = x.astype(np.float64) @ dense(ints).T.astype(np.float64)
        error = np.abs(product(isa.available()[-1], pack_groups(ints), x, 4) - real)
        assert error.max() < 0.01 * np.abs(real).max()
