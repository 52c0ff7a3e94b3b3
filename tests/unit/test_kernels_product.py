"""The product on every path equals one written in numpy in the same order, bit for bit."""

import numpy as np
import pytest

from outrider.kernels.cpu import formats, isa, rows
from outrider.kernels.cpu.machine import compiled
from outrider.kernels.cpu.pack import Packed, pack_dense, pack_groups
from outrider.kernels.cpu.product import multiply, product_address
from outrider.kernels.cpu.workspace import address
from unit.test_kernels_pack import dense, stored

KINDS = [formats.Q4_F16, formats.Q4_F32, formats.Q4_K, formats.Q8_F16, formats.Q8_F32]


@compiled
def run(product, kind, count, w, tile_bytes, tiles, bias, groups, x, stride, meta, plane, out, out_stride, add):
    for tile in range(tiles):
        at = bias + tile * 64 if bias != 0 else 0
        multiply(
            *(product, kind, count, w + tile * tile_bytes, at, groups, x, stride),
            *(meta, groups * 4, plane, out + tile * 64, out_stride, add),
        )


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 rows, and [3, rows, groups] of scales, excess (as bits) and sums."""
    count, k = x.shape
    q, meta = np.zeros((count, k), np.int8), np.zeros((3, count, k // 32), np.float32)
    for r in range(count):
        rows.quantise_row(address(x[r]), k // 32, address(q[r]), *(address(plane[r]) for plane in meta))
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
        dots = (q[:, at].astype(np.int32) @ ints.q[:, at].astype(np.int32).T).astype(np.float32)
        with np.errstate(invalid="ignore"):
            total = total + dots * (ints.scale[:, g] * meta[0, :, g, None])
            if ints.minimum is not None:
                total = total + ints.minimum[:, g] * meta[2, :, g, None]
    return total


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
    for kind, value in ((formats.Q8_F16, 127), (formats.Q8_F16, -127), (formats.Q4_F16, 15)):
        ints = stored(kind, 16, 64)
        ints.q[:] = value
        for sign in (1, -1):
            x = np.full((8, 64), sign * 3.0, np.float32)
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
    for kind in (formats.Q4_F16, formats.Q8_F16):
        ints = stored(kind, 16, 64)
        x = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32)
        clean = product(path, pack_groups(ints), x, 3)
        x[1, 40] = bad
        result = product(path, pack_groups(ints), x, 3)
        assert not np.isfinite(result[1]).any()
        np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


def test_the_product_is_close_to_the_real_one():
    for kind in KINDS:
        ints = stored(kind, 32, 512)
        x = np.random.default_rng(5).normal(size=(4, 512)).astype(np.float32)
        real = x.astype(np.float64) @ dense(ints).T.astype(np.float64)
        error = np.abs(product(isa.available()[-1], pack_groups(ints), x, 4) - real)
        assert error.max() < 0.01 * np.abs(real).max()
