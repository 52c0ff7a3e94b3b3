"""Keys and values in pages of torch tensors, on any device: the KV cache of the reference decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.models.spec import DecoderSpec
from outrider.types import Float32, Int32


class Codec(Protocol):
    """How a head's vector is stored."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Planes to store for x [..., d]."""
        ...

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The vectors that stored planes stand for."""
        ...


class Plain:
    """Stored as a floating point type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return planes[0].to(dtype)


class Int8:
    """Stored as 8-bit integers with one fp32 scale per vector: the largest magnitude becomes 127."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return (planes[0].float() * planes[1]).to(dtype)


def codec_for(kv_dtype: torch.dtype) -> Codec:
    """The codec of a stored type."""
    return Int8() if kv_dtype == torch.int8 else Plain(kv_dtype)


class TorchCache:
    """Pages of all layers. Each plane is [layers, pages, kv_heads, page_size, width]."""

    def __init__(self, spec: DecoderSpec, num_pages: int, page_size: int, codec: Codec, device: torch.device) -> None:
        self.num_pages, self.page_size, self.codec, self.device = num_pages, page_size, codec, device
        pages = (spec.num_layers, num_pages, spec.num_kv_heads, page_size)
        sample = codec.encode(torch.zeros(spec.head_dim))

        def planes() -> tuple[Tensor, ...]:
            return tuple(torch.zeros(*pages, p.shape[-1], dtype=p.dtype, device=device) for p in sample)

        self.k, self.v = planes(), planes()
        self.nbytes = sum(plane.nbytes for plane in self.k + self.v)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [rows, kv_heads, d] of one layer at physical slots [rows]."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        for planes, x in ((self.k, k), (self.v, v)):
            for plane, values in zip(planes, self.codec.encode(x), strict=True):
                plane[layer][pages, :, offsets] = values

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V [entries, kv_heads, d] of one layer at physical slots [entries]; the caller owns the copies."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        k, v = (tuple(plane[layer][pages, :, offsets] for plane in planes) for planes in (self.k, self.v))
        return self.codec.decode(k, dtype), self.codec.decode(v, dtype)

    def key_rows(self, layers: Sequence[int], slots: Int32) -> Float32:
        """Keys [layers, n, kv_heads, d] as floats in main memory."""
        at = self._place(slots)
        return torch.stack([self.read(layer, at, torch.float32)[0] for layer in layers]).cpu().numpy()

    def take(self, slots: Int32) -> list[Tensor]:
        """Copies of the rows at some slots, plane by plane, in main memory."""
        at = self._place(slots)
        pages, offsets = at // self.page_size, at % self.page_size
        return [plane[:, pages, :, offsets].cpu() for plane in self.k + self.v]

    def put(self, slots: Int32, rows: list[Tensor]) -> None:
        """Write back what `take` gave."""
        at = self._place(slots)
        pages, offsets = at // self.page_size, at % self.page_size
        for plane, kept in zip(self.k + self.v, rows, strict=True):
            plane[:, pages, :, offsets] = kept.to(self.device)

    def _place(self, slots: Int32) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def move(self, source: int, target: int) -> None:
        """Copy one slot's K and V in every layer."""
        (page, offset), (to_page, to_offset) = divmod(source, self.page_size), divmod(target, self.page_size)
        for plane in self.k + self.v:
            plane[:, to_page, :, to_offset] = plane[:, page, :, offset]
