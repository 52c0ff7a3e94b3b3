"""Norms, activations, elementary functions and quantisation of single rows."""

import math

import numpy as np
import pytest
import torch

from outrider.kernels.cpu import maths, rows, vectors
from outrider.kernels.cpu.layout import PLANES
from outrider.kernels.cpu.machine import compiled, f32
from outrider.kernels.cpu.workspace import address

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@compiled
def map_exp(x, y, count):
    for i in range(count):
        f32(y)[i] = maths.exp32(f32(x)[i])


@compiled
def map_erf(x, y, count):
    for i in range(count):
        f32(y)[i] = maths.erf32(f32(x)[i])


@compiled
def sums(x, y, count, out):
    f32(out)[0] = vectors.dot(x, y, count)
    f32(out)[1] = vectors.total(x, count)
    f32(out)[2] = vectors.highest(x, count)


def mapped(function, x: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    function(address(x), address(y), len(x))
    return y


def quantised(x: np.ndarray):
    groups = len(x) // 32
    q, meta = np.zeros(len(x), np.int8), np.zeros((PLANES, groups), np.float32)
    rows.quantise_row(address(x), groups, address(q), address(meta), meta.strides[0])
    return q, meta[0], meta[1].view(np.int32), meta[2], meta[3:].view(np.int32)


def test_exp_is_within_two_ulp_and_keeps_its_edges():
    x = np.linspace(-86.9, 87.9, 200_001, dtype=np.float32)
    real = np.exp(x.astype(np.float64))
    assert (np.abs(mapped(map_exp, x) - real) / real).max() < 2.5e-7
    edges = np.array([0, -0.0, -88, -np.inf, np.nan, 200], np.float32)
    got = mapped(map_exp, edges)
    assert got[:4].tolist() == [1, 1, 0, 0]
    assert math.isnan(got[4])
    assert got[5] > 1e38


def test_erf_is_within_half_a_millionth():
    x = np.linspace(-5, 5, 100_001, dtype=np.float32)
    real = torch.erf(torch.from_numpy(x.astype(np.float64))).numpy()
    assert np.abs(mapped(map_erf, x) - real).max() < 5e-7


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_with_torch(name):
    x = np.concatenate([np.linspace(-12, 12, 4001), [-100, 100, 0]]).astype(np.float32)
    source = torch.from_numpy(x.astype(np.float64))
    functions = torch.nn.functional
    real = {
        "silu": functions.silu,
        "relu": functions.relu,
        "gelu": functions.gelu,
        "gelu_tanh": lambda t: functions.gelu(t, approximate="tanh"),
    }[name](source).numpy()
    y = np.append(x, np.float32(np.nan))
    rows.activate(ACTIVATIONS.index(name), address(y), len(y))
    assert np.abs(y[:-1] - real).max() < 3e-6
    assert math.isnan(y[-1])


def test_quantised_groups_are_the_nearest_integers():
    x = np.random.default_rng(0).normal(size=160).astype(np.float32)
    x[40] = 300.0
    q, scale, excess, sum_, halves = quantised(x)
    np.testing.assert_array_equal(scale, np.abs(x.reshape(5, 32)).max(1) / np.float32(127))
    assert (np.abs(q.reshape(5, 32) * scale[:, None] - x.reshape(5, 32)).max(1) <= scale * 0.5001).all()
    assert np.abs(q).max() == 127
    np.testing.assert_array_equal(excess, -128 * q.reshape(5, 32).astype(np.int32).sum(1))
    np.testing.assert_array_equal(halves.T, -32 * q.reshape(5, 2, 16).astype(np.int32).sum(2))
    np.testing.assert_array_equal(sum_, scale * q.reshape(5, 32).sum(1, dtype=np.int32).astype(np.float32))


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-33])
def test_zero_and_denormal_groups_become_zero(value):
    q, scale, _, sum_, _ = quantised(np.full(32, value, np.float32))
    assert not q.any()
    assert scale[0] == sum_[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_group_has_a_bad_scale(value):
    x = np.ones(64, np.float32)
    x[7] = value
    q, scale, _, sum_, _ = quantised(x)
    assert not np.isfinite(scale[0])
    assert not np.isfinite(sum_[0])
    assert np.isfinite(scale[1])
    assert (q[32:] == 127).all()


@pytest.mark.parametrize("size", [16, 48, 50])
def test_norms_agree_with_numpy(size):
    rng = np.random.default_rng(size)
    x, weight, bias = (np.zeros(64, np.float32) for _ in range(3))
    x[:size], weight[:size], bias[:size] = (rng.normal(size=size) for _ in range(3))
    wide = x[:size].astype(np.float64)
    out = np.zeros(64, np.float32)
    rows.rms_norm(address(x), size, address(weight), np.float32(1e-5), address(out))
    real = wide / np.sqrt((wide**2).mean() + 1e-5) * weight[:size]
    np.testing.assert_allclose(out[:size], real, rtol=1e-5, atol=1e-6)
    rows.layer_norm(address(x), size, address(weight), address(bias), np.float32(1e-5), address(out))
    real = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5) * weight[:size] + bias[:size]
    np.testing.assert_allclose(out[:size], real, rtol=1e-5, atol=1e-5)
    assert not out[size:].any()


def test_sums_have_a_fixed_order():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 96)).astype(np.float32)
    lanes = np.zeros((2, 16), np.float32)
    for i in range(0, 96, 16):
        lanes[0] += x[i : i + 16] * y[i : i + 16]
        lanes[1] += x[i : i + 16]
    while lanes.shape[1] > 1:
        lanes = np.add(*np.split(lanes, 2, axis=1))
    out = np.zeros(3, np.float32)
    sums(address(x), address(y), 96, address(out))
    np.testing.assert_array_equal(out, [*lanes[:, 0], x.max()])
