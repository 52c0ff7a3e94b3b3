"""Logits to a token in compiled loops: temperature, min-p, top-k, top-p, then an exponential race.

The race is the Gumbel-max trick in its exponential form: token i arrives at E_i / p_i with E_i ~ Exp(1), and the first
one wins with probability p_i. E_i comes from a counter-based hash of (seed, sample, position, token), so that a token's
noise depends on nothing that ran before or beside it. `oracle.py` says the same in a few lines of numpy.

All loops are sequential and use no fused or reordered arithmetic: a row's result never depends on threads or batching.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.types import Float32, Float64

_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)

_BLOCK = 2048  # tokens whose weights are computed at a time
_ROUNDER = 1.5 * 2.0**52  # adding it rounds a small float64 to an integer held in the low mantissa bits
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_NOTHING = np.uint32(0x007FFFFF)  # the order key of -inf
_SMALLEST = -708.0  # exp below this is no longer a normal float64 and counts as zero


def stream(*words: int) -> np.uint64:
    """A key that differs for every tuple of integers (splitmix64 chained over them; Steele et al. 2014)."""
    state = 0
    for word in words:
        state = (state ^ (word & _WORD)) + int(_GOLDEN) & _WORD
        state = (state ^ state >> 30) * int(_MIX_A) & _WORD
        state = (state ^ state >> 27) * int(_MIX_B) & _WORD
        state ^= state >> 31
    return np.uint64(state)


@njit(cache=True, nogil=True, inline="always")
def _uniform(key, token):
    """A float64 strictly between 0 and 1, fixed by (key, token)."""
    z = key + np.uint64(token + 1) * _GOLDEN
    z = (z ^ (z >> _S30)) * _MIX_A
    z = (z ^ (z >> _S27)) * _MIX_B
    z = z ^ (z >> _S31)
    return (np.float64(z >> _S11) + 0.5) * 2.0**-53


@njit(cache=True, nogil=True)
def uniform(key: np.uint64, token: int) -> float:
    """The noise of one token as a uniform number in (0, 1)."""
    return _uniform(key, token)


@njit(cache=True, nogil=True)
def race(p: Float64, key: np.uint64) -> int:
    """The winner among tokens 0 .. len(p) - 1 with weights p (they need not sum to 1); -1 when all are zero."""
    winner, first = -1, np.inf
    for token in range(p.shape[0]):
        weight = p[token]
        if weight > 0.0:
            u = _uniform(key, token)
            # -log(u) >= 1 - u: most tokens lose without a logarithm.
            if 1.0 - u < first * weight:
                arrival = -math.log(u) / weight
                if arrival < first:
                    winner, first = token, arrival
    return winner


@njit(cache=True, nogil=True)
def _order_keys(logits: Float32, size: int) -> NDArray[np.uint32]:
    """Integers in the order of the logits; equal logits have equal keys, NaN is as low as -inf."""
    keys = np.empty(size, np.uint32)
    floats = keys.view(np.float32)
    for i in range(size):
        value = logits[i]
        floats[i] = value + np.float32(0.0) if value == value else np.float32(-np.inf)
    for i in range(size):
        sign = np.uint32(0) - (keys[i] >> np.uint32(31))
        keys[i] ^= sign | np.uint32(0x80000000)
    return keys


@njit(cache=True, nogil=True)
def best_token(logits: Float32, vocab_size: int) -> int:
    """The lowest id below `vocab_size` with the greatest logit; -1 when all are -inf or NaN."""
    return _first_greatest(_order_keys(logits, min(vocab_size, logits.shape[0])))


@njit(cache=True, nogil=True)
def _first_greatest(keys: NDArray[np.uint32]) -> int:
    """Index of the greatest key, the first of equals; -1 when none stands for more than -inf."""
    most = _NOTHING
    for i in range(keys.shape[0]):
        most = max(most, keys[i])
    if most == _NOTHING:
        return -1
    for i in range(keys.shape[0]):
        if keys[i] == most:
            return i
    return -1


@njit(cache=True, nogil=True)
def _exponentiate(x: Float64, scratch: Float64) -> None:
    """x[i] = exp(x[i]) in place for x <= 0: 2^k * P(r), relative error below 1e-15, in loops that vectorise.

    scratch: float64 of the same length; short arrays stay in the cache.
    """
    for i in range(x.shape[0]):
        value = x[i]
        value = value if value > _SMALLEST else _SMALLEST
        rounded = value * _LOG2E + _ROUNDER
        k = rounded - _ROUNDER
        r = (value - k * _LN2_HIGH) - k * _LN2_LOW
        series = 1.0 / 6227020800.0
        series = series * r + 1.0 / 479001600.0
        series = series * r + 1.0 / 39916800.0
        series = series * r + 1.0 / 3628800.0
        series = series * r + 1.0 / 362880.0
        series = series * r + 1.0 / 40320.0
        series = series * r + 1.0 / 5040.0
        series = series * r + 1.0 / 720.0
        series = series * r + 1.0 / 120.0
        series = series * r + 1.0 / 24.0
        series = series * r + 1.0 / 6.0
        series = series * r + 0.5
        series = series * r + 1.0
        series = series * r + 1.0
        scratch[i] = rounded
        x[i] = series if value > _SMALLEST else 0.0
    bits = scratch.view(np.int64)
    for i in range(x.shape[0]):
        bits[i] = (bits[i] + 1023) << 52
    for i in range(x.shape[0]):
        x[i] *= scratch[i]


@njit(cache=True, nogil=True)
def _threshold(keys: NDArray[np.uint32], weights: Float64, limit: float) -> int:
    """The key t for which what lies above t weighs less than `limit`, and t included at least `limit`.

    A radix walk over 11 + 11 + 10 bits: three passes whatever the values, no sort. Keeping keys >= t keeps ties,
    so the result does not depend on how token ids are numbered.
    """
    prefix, above = 0, 0.0
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        heap = np.zeros(1 << bits, np.float64)
        mask = (1 << bits) - 1
        for i in range(keys.shape[0]):
            key = np.int64(keys[i])
            if key >> (shift + bits) == prefix:
                heap[(key >> shift) & mask] += weights[i]
        chosen = 0
        for bucket in range(mask, -1, -1):
            if heap[bucket] > 0.0:
                chosen = bucket
                if above + heap[bucket] >= limit:
                    break
                above += heap[bucket]
        else:
            above -= heap[chosen]
        prefix = (prefix << bits) | chosen
    return prefix


@njit(cache=True, nogil=True)
def probabilities(
    logits: Float32, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> Float64:
    """p [V] in vLLM's order: temperature, min-p, top-k, top-p, normalised; all zero when nothing is allowed.

    top_k <= 0 means all. min-p keeps p >= min_p * max p. top-k keeps what ties with the k-th; top-p keeps a token when
    the tokens above it hold less than top_p of the mass that min-p and top-k left.
    """
    p = np.zeros(logits.shape[0], np.float64)
    size = min(vocab_size, logits.shape[0])
    keys = _order_keys(logits, size)
    best = _first_greatest(keys)
    if best < 0:
        return p
    top, inverse = logits[best], 1.0 / temperature
    if 0 < top_k < size:
        ids = _at_least(keys, _kth_greatest(keys, top_k))
        kept = np.empty(ids.shape[0], np.float64)
        _distribute(kept, _take(logits, ids), _take(keys, ids), top, inverse, top_p, min_p)
        for i in range(ids.shape[0]):
            p[ids[i]] = kept[i]
    else:
        _distribute(p[:size], logits[:size], keys, top, inverse, top_p, min_p)
    return p


@njit(cache=True, nogil=True)
def _at_least(values: NDArray, least: float) -> NDArray[np.int64]:
    """Indices of the values that are `least` or more, ascending."""
    found = np.empty(values.shape[0], np.int64)
    count = 0
    for i in range(values.shape[0]):
        found[count] = i
        count += values[i] >= least
    return found[:count]


@njit(cache=True, nogil=True)
def _take(values: NDArray, indices: NDArray[np.int64]) -> NDArray:
    """values[indices]; a loop compiles in a fraction of the time of numpy's indexing."""
    taken = np.empty(indices.shape[0], values.dtype)
    for i in range(indices.shape[0]):
        taken[i] = values[indices[i]]
    return taken


@njit(cache=True, nogil=True)
def _kth_greatest(keys: NDArray[np.uint32], k: int) -> int:
    """The k-th greatest key. The k-th greatest of block maxima bounds it from below and leaves few candidates."""
    blocks = keys.shape[0] // 64
    if blocks >= 4 * k:
        maxima = np.zeros(blocks, np.uint32)
        for block in range(blocks):
            most = np.uint32(0)
            for i in range(64 * block, 64 * block + 64):
                most = max(most, keys[i])
            maxima[block] = most
        least = _threshold(maxima, np.ones(blocks), float(k))
        keys = _take(keys, _at_least(keys, least))
    return _threshold(keys, np.ones(keys.shape[0]), float(k))


@njit(cache=True, nogil=True)
def _distribute(
    p: Float64,
    logits: Float32,
    keys: NDArray[np.uint32],
    top: float,
    inverse_temperature: float,
    top_p: float,
    min_p: float,
) -> None:
    """Fill p with the law of tokens with these logits, of which the greatest is `top`: min-p, top-p, normalised."""
    _weigh(p, logits, top, inverse_temperature)
    if min_p > 0.0:
        for i in range(p.shape[0]):
            p[i] = p[i] if p[i] >= min_p else 0.0
    if top_p < 1.0:
        # What weighs less than this is less than 1 - top_p even all together, as the best token weighs 1.
        heavy = _at_least(p, 0.5 * (1.0 - top_p) / p.shape[0])
        lowest = _threshold(_take(keys, heavy), _take(p, heavy), top_p * _total(p))
        for i in range(p.shape[0]):
            p[i] = p[i] if np.int64(keys[i]) >= lowest else 0.0
    scale = 1.0 / _total(p)
    for i in range(p.shape[0]):
        p[i] *= scale


@njit(cache=True, nogil=True)
def _weigh(weights: Float64, logits: Float32, top: float, inverse_temperature: float) -> None:
    """weights[i] = exp((logits[i] - top) / temperature), so that the best token weighs 1; NaN weighs nothing."""
    scratch = np.empty(_BLOCK, np.float64)
    for start in range(0, weights.shape[0], _BLOCK):
        block = weights[start : start + _BLOCK]
        for i in range(block.shape[0]):
            block[i] = (np.float64(logits[start + i]) - top) * inverse_temperature
        _exponentiate(block, scratch[: block.shape[0]])
    if top == np.inf:
        for i in range(weights.shape[0]):
            weights[i] = 1.0 if logits[i] == top else 0.0


@njit(cache=True, nogil=True)
def _total(x: Float64) -> float:
    """The sum of x in a fixed order: four interleaved partial sums."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = x.shape[0] & ~3
    for i in range(0, whole, 4):
        a += x[i]
        b += x[i + 1]
        c += x[i + 2]
        d += x[i + 3]
    for i in range(whole, x.shape[0]):
        a += x[i]
    return (a + b) + (c + d)
