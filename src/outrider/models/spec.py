"""What a dense decoder is: one frozen description that every backend executes, and its named weights.

A family file (llama.py, qwen2.py, ...) turns a config.json or GGUF header into a DecoderSpec and names its tensors;
the reference decoder (decoder.py) and the compiled one (compiled.py) both run any spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider.types import Batch, Float32, Int32, Result


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, half-split ("neox") layout: dimension i turns with i + dim / 2.

    kind `llama3` and `yarn` carry their Hugging Face `rope_scaling` fields in `scaling`.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    scaling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderSpec:
    """Shape and wiring of one dense decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_first: bool = True  # False: post-norm (OPT-350m)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    rope: Rope | None = field(default_factory=Rope)  # None: learned positions (pos_embed)
    position_offset: int = 0  # added to positions before pos_embed (OPT: 2)
    qk_norm: bool = False  # RMS norm of every query and key head (Qwen3)
    sliding_window: int | None = None  # entries a row may look back on, itself included
    windowed_layers: tuple[int, ...] | None = None  # layers with the window; None: all of them
    tied: bool = True  # lm_head is embed
    eos_token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None  # ids that text can stand for; Result.best stays below it (None: vocab_size)

    def check_taps(self, taps: Iterable[int]) -> None:
        """Refuse taps that are not layers."""
        wrong = [tap for tap in taps if not 0 <= tap < self.num_layers]
        if wrong:
            raise ConfigError(f"taps {wrong} are not layers of the model; use 0 to {self.num_layers - 1}", "taps")


class Weight(Protocol):
    """One matrix or vector as it was stored; matrices are [out, in]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] of a matrix, [n] of a vector."""
        ...

    def dense(self) -> Float32:
        """The values in fp32, row-major."""
        ...

    def groups(self) -> GroupedInts | None:
        """The stored integers, where the format is scale * q + minimum per group of inputs; else None."""
        ...


@runtime_checkable
class SlicedWeight(Weight, Protocol):
    """A matrix in a file of which a range of rows can be read alone, so that no copy of it need be held whole."""

    def part(self, first: int, last: int) -> Weight:
        """Rows first .. last - 1."""
        ...

    def release(self) -> None:
        """Let go of the memory through which the file was read; what is read again comes from the file again."""
        ...


@dataclass(frozen=True)
class GroupedInts:
    """value[n, k] = scale[n, k // 32] * q[n, k] + minimum[n, k // 32].

    bits 4: q uint8 in 0..15; bits 8: q int8 in -127..127 and minimum None.
    bits 6: q int8 in -32..31, no minimum, and a scale per 16 inputs, scale[n, k // 16]: a whole number in -128..127
    times factor[n, k // 256], which fp16 holds. K is a multiple of 256.
    Scales and minima are fp32 holding exactly what the file holds (Q4_K, Q6_K: product of their two factors).
    """

    bits: Literal[4, 6, 8]
    q: NDArray[np.uint8] | NDArray[np.int8]  # [N, K]
    scale: Float32  # [N, K / 32], bits 6: [N, K / 16]
    minimum: Float32 | None = None  # [N, K / 32]
    factor: Float32 | None = None  # [N, K / 256], bits 6 only


#: Canonical names of a decoder's weights ("layers.{i}." before the layer ones):
#:   embed [V, H], pos_embed [P, H], final_norm(.bias), lm_head [V, H] (absent when tied),
#:   project_in [H, E], project_out [E, H] (OPT-350m only),
#:   layers.{i}.: attn_norm(.bias), q, k, v, o (each with optional ".bias"), q_norm, k_norm,
#:   mlp_norm(.bias), gate, up, down (with optional ".bias").
#: q and k rows are in half-split RoPE order whatever the file's order was.
Weights = Mapping[str, Weight]


class KVCache(Protocol):
    """Keys and values of all layers in pages. Arrays are [pages, kv_heads, page_size, head_dim]."""

    page_size: int
    num_pages: int
    nbytes: int

    def move(self, source: int, target: int) -> None:
        """Copy one slot's K and V in every layer (tree acceptance compacts the accepted path)."""
        ...

    def key_rows(self, layers: Sequence[int], slots: Int32) -> Float32:
        """The keys [layers, n, kv_heads, head_dim] that some layers hold at `slots` [n], as attention reads them."""
        ...

    def take(self, slots: Int32) -> Any:
        """A copy of all that `slots` [n] hold in every layer, for `put`."""
        ...

    def put(self, slots: Int32, rows: Any) -> None:
        """Write back, bit for bit, what `take` gave for as many slots."""
        ...


class Decoder(Protocol):
    """A target or drafter model. forward() is the only way in; it keeps no state of its own between calls."""

    spec: DecoderSpec
    taps: tuple[int, ...]  # layers whose output hidden states Result.features carries; empty: none
    query_taps: tuple[int, ...]  # layers whose queries Result.queries carries; empty: none
    weight_bytes: int
    step_bytes: int  # of the weights that a pass of one row reads: of an embedding that is no output matrix, one row

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        """An empty cache of the type that this decoder writes. CapacityError where memory runs out."""
        ...

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        ...

    def retap(self, taps: tuple[int, ...]) -> None:
        """Give the states behind other layers from the next pass on. ConfigError where there is no such layer."""
        ...

    def retap_queries(self, taps: tuple[int, ...]) -> None:
        """Give the queries of other layers from the next pass on. ConfigError where there is no such layer."""
        ...

    def forward(self, batch: Batch, cache: KVCache, before_layer: Callable[[int], int | None] | None = None) -> Result:
        """Write the rows' K and V and return the best tokens, logits and features that the batch asks for.

        `before_layer(l)` is called ahead of the first slow layer and gives the next one ahead of which it must be
        called; None: the next layer. RequestError where the decoder knows no slow layers.

        A row's result does not depend on the other rows of the batch, on how a prompt was cut into chunks, nor on
        the number of threads: bitwise on the CPU.
        """
        ...
