"""Elementary functions in float32 that give the same bits in a loop, in a vector and alone."""

from __future__ import annotations

import numpy as np

from outrider.kernels.cpu.machine import bits_of, compiled, float_of

_ONE, _TWO, _HALF = np.float32(1), np.float32(2), np.float32(0.5)
#: Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest even integer.
_ROUND = np.float32(12582912.0)
_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_P = np.float32(0.3275911)
_A1, _A2, _A3 = np.float32(0.254829592), np.float32(-0.284496736), np.float32(1.421413741)
_A4, _A5 = np.float32(-1.453152027), np.float32(1.061405429)
_SQRT_HALF = np.float32(0.70710678118654752)
_SQRT_2_PI, _CUBE = np.float32(0.7978845608028654), np.float32(0.044715)


@compiled
def exp32(x: np.float32) -> np.float32:
    """e^x within 2 ulp (Cephes expf); 0 below -87, the value at 88 above it, NaN stays NaN."""
    clipped = _LOWEST if x < _LOWEST else (min(x, _HIGHEST))
    shifted = clipped * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = clipped - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = p * (r * r) + r + _ONE
    power = float_of(np.int32((bits_of(shifted) - bits_of(_ROUND) + np.int32(127)) << np.int32(23)))
    return np.float32(0) if x < _LOWEST else y * power


@compiled
def erf32(x: np.float32) -> np.float32:
    """erf(x) within 5e-7 (Abramowitz and Stegun, 7.1.26)."""
    a = abs(x)
    t = _ONE / (_ONE + _P * a)
    y = _ONE - ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * exp32(-a * a)
    return -y if x < np.float32(0) else y


@compiled
def silu(x: np.float32) -> np.float32:
    """x * sigmoid(x)."""
    return x / (_ONE + exp32(-x))


@compiled
def gelu(x: np.float32) -> np.float32:
    """x * P(normal <= x), by erf."""
    return _HALF * x * (_ONE + erf32(x * _SQRT_HALF))


@compiled
def gelu_tanh(x: np.float32) -> np.float32:
    """GELU's approximation by tanh, as the models that name it were trained with."""
    u = _SQRT_2_PI * (x + _CUBE * x * x * x)
    return _HALF * x * (_TWO - _TWO / (exp32(_TWO * u) + _ONE))


@compiled
def relu(x: np.float32) -> np.float32:
    """max(x, 0); NaN stays NaN."""
    return max(x, np.float32(0))
