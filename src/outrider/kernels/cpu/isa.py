"""Which instructions the integer products use. All paths give the same bits; they differ in speed."""

from __future__ import annotations

import os
from functools import lru_cache

import llvmlite.binding as llvm

from outrider.errors import ConfigError

GENERIC, AVX2, VNNI, AVX512 = range(4)
_NEEDS = {
    "generic": frozenset[str](),
    "avx2": frozenset({"avx2"}),
    "vnni": frozenset({"avx2", "avxvnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
}
NAMES = tuple(_NEEDS)


def available() -> tuple[str, ...]:
    """Names of the paths that this processor can run, slowest first."""
    features = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if {"avx512vl", "avx512vnni"} <= features:
        features.add("avxvnni")  # the same instruction on 256 bits, in its other encoding
    return tuple(name for name, needs in _NEEDS.items() if needs <= features)


@lru_cache
def resolve(name: str) -> str:
    """`name`, or the fastest path of this processor where it is empty or "auto".

    Raises ConfigError where the processor cannot run the path or no path has this name.
    """
    paths = available()
    if name in ("", "auto"):
        return paths[-1]
    if name not in NAMES:
        raise ConfigError.unknown(name, NAMES, "OUTRIDER_CPU")
    if name not in paths:
        raise ConfigError(
            f"OUTRIDER_CPU={name}: this processor lacks it; use one of {', '.join(paths)}", "OUTRIDER_CPU"
        )
    return name


def wanted() -> str:
    """The path that the environment variable OUTRIDER_CPU asks for; empty: the fastest."""
    return os.environ.get("OUTRIDER_CPU", "")
