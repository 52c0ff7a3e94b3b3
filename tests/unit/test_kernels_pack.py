"""Packed weights hold what was stored, bit for bit, in every format."""

import numpy as np
import pytest

from compiling import Stored
from outrider.kernels.cpu import formats, layout
from outrider.kernels.cpu import pack as packing
from outrider.kernels.cpu.machine import compiled
from outrider.kernels.cpu.pack import Packed, pack, pack_dense, pack_groups, quantise_dense
from outrider.kernels.cpu.unpack import expand_channel
from outrider.kernels.cpu.workspace import address
from outrider.models.spec import GroupedInts


@compiled
def expand_all(matrices, n, out, stride):
    for channel in range(n):
        expand_channel(matrices[0], channel, out + channel * stride)


def expand(packed: Packed) -> np.ndarray:
    """Every channel as the embedding reads it."""
    matrix = np.zeros(1, layout.MATRIX)
    tiles, size = packed.data.shape
    matrix[0] = (address(packed.data), 0, tiles, packed.groups, packed.kind, size, packed.n)
    out = np.zeros((packed.n, packed.groups * 32), np.float32)
    expand_all(matrix, packed.n, address(out), out.strides[0])
    return out[:, : packed.k]


def stored(kind: int, n: int, k: int, seed: int = 0) -> GroupedInts:
    """Random integers whose scales need exactly this format."""
    rng = np.random.default_rng(seed)
    groups = -(-k // 32)

    def scales(dtype: type) -> np.ndarray:
        return rng.normal(size=(n, groups)).astype(dtype).astype(np.float32)

    if kind == formats.Q6_K:
        factor = rng.normal(size=(n, k // 256)).astype(np.float16).astype(np.float32)
        scale = rng.integers(-128, 128, (n, k // 16)).astype(np.float32) * np.repeat(factor, 16, 1)
        return GroupedInts(6, rng.integers(-32, 32, (n, k)).astype(np.int8), scale, factor=factor)
    if kind in (formats.Q8_F16, formats.Q8_F32):
        q8 = rng.integers(-127, 128, (n, k)).astype(np.int8)
        return GroupedInts(8, q8, scales(np.float16 if kind == formats.Q8_F16 else np.float32))
    q4 = rng.integers(0, 16, (n, k), dtype=np.uint8)
    if kind == formats.Q4_K:
        factors = [np.repeat(np.abs(scales(np.float16))[:, ::8], 8, 1) for _ in range(2)]
        counts = [rng.integers(0, 64, (n, groups)).astype(np.float32) for _ in range(2)]
        return GroupedInts(4, q4, factors[0] * counts[0], -factors[1] * counts[1])
    dtype = np.float16 if kind == formats.Q4_F16 else np.float32
    return GroupedInts(4, q4, scales(dtype), scales(dtype))


def dense(ints: GroupedInts) -> np.ndarray:
    """The values in fp32, as GroupedInts defines them."""
    k = ints.q.shape[1]
    values = np.repeat(ints.scale, 16 if ints.bits == 6 else 32, 1)[:, :k] * ints.q.astype(np.float32)
    return values if ints.minimum is None else values + np.repeat(ints.minimum, 32, 1)[:, :k]


@pytest.mark.parametrize("kind", range(formats.Q4_F16, len(formats.NAMES)))
@pytest.mark.parametrize(("n", "k"), [(16, 256), (37, 512)])
def test_stored_integers_survive_packing(kind, n, k):
    ints = stored(kind, n, k)
    packed = pack_groups(ints)
    assert packed.kind == kind
    np.testing.assert_array_equal(expand(packed), dense(ints))


@pytest.mark.parametrize(("n", "k"), [(5, 7), (17, 72)])
def test_sizes_that_fill_no_tile_are_padded(n, k):
    for ints in (stored(formats.Q4_F16, n, k), stored(formats.Q8_F16, n, k)):
        np.testing.assert_array_equal(expand(pack_groups(ints)), dense(ints))
    values = np.random.default_rng(0).normal(size=(n, k)).astype(np.float32)
    np.testing.assert_array_equal(expand(pack_dense(values)), values)


def test_q4_k_costs_less_than_a_scale_per_group():
    small, large = pack_groups(stored(formats.Q4_K, 16, 512)), pack_groups(stored(formats.Q4_F32, 16, 512))
    assert small.data.nbytes == 16 * 512 * 4.625 / 8
    assert large.data.nbytes == 16 * 512 * 6 / 8
    assert pack_groups(stored(formats.Q6_K, 16, 512)).data.nbytes == 16 * 512 * 6.5625 / 8


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_six_bit_groups_without_size_are_zero_and_bad_ones_show(bad):
    ints = stored(formats.Q6_K, 16, 512)
    ints.factor[3, 0] = ints.scale[3, :16] = 0
    ints.factor[4, 1] = ints.scale[4, 16:] = bad
    values = expand(pack_groups(ints))
    assert not values[3, :256].any()
    assert np.isfinite(values[4, :256]).all()
    assert not np.isfinite(values[4, 256:]).any()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.5 / 127), (4, 0.5 / 14)])
def test_dense_weights_are_rounded_to_the_nearest_step(bits, most):
    values = np.random.default_rng(0).normal(size=(33, 96)).astype(np.float32)
    values[3, 5] = 50.0
    values[4, 32:64] = 0.0
    error = np.abs(expand(pack_groups(quantise_dense(values, bits))) - values).reshape(33, 3, 32).max(-1)
    span = np.ptp(np.concatenate([values.reshape(33, 3, 32), np.zeros((33, 3, 1))], -1), -1)
    assert (error <= most * span * 1.02 + 1e-6).all()
    assert error.max() > 0


def test_tiny_and_bad_values_are_not_lost():
    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    for bits in (8, 4):
        packed = pack_groups(quantise_dense(values * 1e-6, bits))
        assert packed.kind in (formats.Q8_F32, formats.Q4_F32)
        np.testing.assert_allclose(expand(packed) * 1e6, values, atol=0.02 if bits == 8 else 0.3)
        bad = values.copy()
        bad[2, 40] = np.nan
        shown = np.isnan(expand(pack_groups(quantise_dense(bad, bits))))
        assert shown[2, 32:].all()
        assert shown.sum() == 32


def as_weight(ints: GroupedInts) -> Stored:
    return Stored(dense(ints), ints)


def test_modes_keep_what_is_stored_where_it_is_small_enough():
    four, eight = as_weight(stored(formats.Q4_F16, 16, 64)), as_weight(stored(formats.Q8_F16, 16, 64))
    assert [pack(four, mode).kind for mode in ("auto", "int8", "int4")] == [formats.Q4_F16] * 3
    assert [pack(eight, mode).kind for mode in ("auto", "int8")] == [formats.Q8_F16] * 2
    assert pack(eight, "int4").kind == formats.Q4_F16
    six = as_weight(stored(formats.Q6_K, 16, 256))
    assert [pack(six, mode).kind for mode in ("auto", "int8")] == [formats.Q6_K] * 2
    assert pack(six, "int4").kind == formats.Q4_F16
    assert pack(four, "float32").kind == formats.F32


class InFile:
    """A matrix that can be read a range of rows at a time; remembers what was read."""

    def __init__(self, ints: GroupedInts):
        self.ints, self.reads, self.released = ints, [], 0
        self.shape = ints.q.shape

    def dense(self):
        return dense(self.ints)

    def groups(self):
        return self.ints

    def part(self, first, last):
        self.reads.append((first, last))
        extra = {name: getattr(self.ints, name) for name in ("minimum", "factor")}
        extra = {name: values if values is None else values[first:last] for name, values in extra.items()}
        return InFile(GroupedInts(self.ints.bits, self.ints.q[first:last], self.ints.scale[first:last], **extra))

    def release(self):
        self.released += 1


@pytest.mark.parametrize("kind", range(formats.Q4_F16, len(formats.NAMES)))
def test_a_matrix_read_by_parts_is_packed_as_one(kind, monkeypatch):
    monkeypatch.setattr(packing, "_PART", 32 * 256)
    weight = InFile(stored(kind, 101, 256))
    packed, whole = pack(weight), pack_groups(weight.ints)
    assert packed.kind == whole.kind == kind
    np.testing.assert_array_equal(packed.data, whole.data)
    assert weight.reads[-3:] == [(32, 64), (64, 96), (96, 101)]
    assert weight.released == len(weight.reads)


def test_a_late_part_may_need_wider_scales(monkeypatch):
    monkeypatch.setattr(packing, "_PART", 32 * 256)
    ints = stored(formats.Q8_F16, 96, 256)
    ints.scale[90, 3] = 0.1
    packed = pack(InFile(ints))
    assert packed.kind == formats.Q8_F32
    np.testing.assert_array_equal(expand(packed), dense(ints))


def test_a_late_part_without_integers_makes_the_whole_dense(monkeypatch):
    class Broken(InFile):
        def part(self, first, last):
            found = super().part(first, last)
            found.groups = lambda: None if first else found.ints
            return found

    monkeypatch.setattr(packing, "_PART", 32 * 256)
    weight = Broken(stored(formats.Q4_F16, 96, 256))
    assert pack(weight).kind == formats.Q8_F16
