"""Which decoder runs a model: the compiled one on a CPU, the reference everywhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from outrider.errors import ConfigError, ModelError
from outrider.models.spec import Decoder, DecoderSpec, Weights

Backend = Literal["auto", "compiled", "reference"]
FEWEST = "fewest"  # a dtype: as few bits as the decoder can multiply
log = logging.getLogger(__name__)


def build_decoder(
    spec: DecoderSpec,
    weights: Weights,
    *,
    dtype: str = "auto",
    device: str = "auto",
    kv_dtype: str = "auto",
    threads: int | None = None,
    taps: Sequence[int] = (),
    backend: Backend = "auto",
) -> Decoder:
    """A decoder for these weights.

    backend auto takes the compiled decoder on a CPU and falls back, with a warning, to the reference where the
    compiled one does not know the model's wiring; accelerators use the reference. dtype auto is the decoder's own
    best choice: bfloat16 on an accelerator, and on a CPU whatever the compiled decoder makes of the stored weights;
    "fewest" is the same with 4 bits on a CPU, for drafters, whose errors cost acceptance and never a token.
    ModelError or ConfigError where the weights, the device or the types do not fit.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend = {backend!r} is refused; use one of {', '.join(get_args(Backend))}", "backend")
    place = known_device(device)
    if backend == "reference" or place != "cpu":
        return _reference(spec, weights, dtype, place, kv_dtype, taps)
    try:
        return _compiled(spec, weights, dtype, kv_dtype, threads, taps)
    except ModelError as refusal:
        if backend == "compiled":
            raise
        log.warning("%s: the slower reference decoder is used instead", refusal)
        return _reference(spec, weights, dtype, place, kv_dtype, taps)


def _compiled(
    spec: DecoderSpec, weights: Weights, dtype: str, kv_dtype: str, threads: int | None, taps: Sequence[int]
) -> Decoder:
    # Imported here because Numba takes seconds to import, which an accelerator should not wait for.
    from outrider.models.compiled import CompiledDecoder

    dtype = "int4" if dtype == FEWEST else dtype
    return CompiledDecoder.build(spec, weights, dtype=dtype, kv_dtype=kv_dtype, threads=threads, taps=tuple(taps))


def _reference(
    spec: DecoderSpec, weights: Weights, dtype: str, device: str, kv_dtype: str, taps: Sequence[int]
) -> Decoder:
    # Imported here because PyTorch takes seconds to import, which the compiled decoder should not wait for.
    from outrider.models.decoder import ReferenceDecoder

    if dtype in ("auto", FEWEST):
        dtype = "float32" if device == "cpu" else "bfloat16"
    return ReferenceDecoder.build(spec, weights, dtype=dtype, device=device, kv_dtype=kv_dtype, taps=taps)


def known_device(name: str) -> str:
    """The torch device that a name stands for: auto is CUDA where there is one. ConfigError where there is none."""
    if name == "cpu" or (name == "auto" and not _may_have_cuda()):
        return "cpu"
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = found is not None and found.type == "cuda"
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r} is refused; use auto, cpu, cuda or cuda:N", "device")
    if kind == "cuda" and not has_cuda:
        raise ConfigError(f"device = {name!r}, but torch finds no CUDA device here; use auto or cpu", "device")
    return name


def _may_have_cuda() -> bool:
    """Whether asking torch could find a device: on Linux a driver leaves its control file, macOS has none."""
    if sys.platform == "linux":
        return any(Path(control).exists() for control in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return sys.platform != "darwin"
