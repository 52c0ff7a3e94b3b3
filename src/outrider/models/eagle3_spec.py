"""What an EAGLE-3 head is (arXiv 2503.01840): its shape, read from a config.json of either public layout.

Free of PyTorch: the compiled head (compiled_head.py) starts without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ModelError
from outrider.models import hf_config
from outrider.models.rope import rope_from_config
from outrider.models.spec import DecoderSpec, Rope

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")

#: What heads trained without these fields mean by their absence: Llama's first values, not the target's.
DEFAULT_THETA = 10000.0
DEFAULT_POSITIONS = 2048

#: Names the tapped layers, see `_taps`.
TAPS = "eagle_aux_hidden_state_layer_ids"

REFUSED = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Spec:
    """Shape of a head. `taps` are the target's layers (0-based) whose output it is fed with, low to high."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    max_positions: int = DEFAULT_POSITIONS
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope: Rope = field(default_factory=lambda: Rope(theta=DEFAULT_THETA))
    attention_bias: bool = False
    norm_before_residual: bool = False  # True: the residual is the normed state (speculators' heads)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The published choice: layers 1, L // 2 - 1 and L - 4, held inside small targets."""
    low, middle, high = (min(max(tap, 0), num_layers - 1) for tap in (1, num_layers // 2 - 1, num_layers - 4))
    return low, middle, high


def spec_from_config(config: Mapping[str, Any], target: DecoderSpec) -> Eagle3Spec:
    """The spec of a head's config.json, in either public layout. ModelError where it does not suit this target."""
    speculators = "speculators_model_type" in config
    layer = config["transformer_layer_config"] if speculators else config
    _refuse(config, layer)
    num_heads, num_kv_heads = hf_config.heads(layer)
    hidden = hf_config.integer(layer, "hidden_size")
    vocab = hf_config.integer(layer, "vocab_size")
    _match("hidden_size", hidden, target.hidden_size)
    _match("target_hidden_size", hf_config.integer(config, "target_hidden_size", hidden), target.hidden_size)
    _match("vocab_size", vocab, target.vocab_size)
    positions = hf_config.integer(layer, "max_position_embeddings", DEFAULT_POSITIONS)
    return Eagle3Spec(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=hf_config.integer(config, "draft_vocab_size", vocab),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf_config.integer(layer, "head_dim", hidden // num_heads),
        intermediate_size=hf_config.integer(layer, "intermediate_size"),
        taps=_taps(config, target.num_layers),
        max_positions=positions,
        norm_eps=hf_config.real(layer, "rms_norm_eps", 1e-6),
        activation=hf_config.activation(layer, "hidden_act", "silu"),
        rope=rope_from_config({**layer, "max_position_embeddings": positions}, DEFAULT_THETA),
        attention_bias=hf_config.truth(layer, "attention_bias", False),
        norm_before_residual=hf_config.truth(config, "norm_before_residual", speculators),
    )


def _refuse(config: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    hf_config.refuse_unsupported(layer)
    kind = config.get("speculators_model_type", "eagle3")
    named = set(config.get("architectures") or ARCHITECTURES[:1])
    if kind != "eagle3" or not named & set(ARCHITECTURES):
        raise ModelError(f"the head's config.json names {kind}, {sorted(named)}: not an EAGLE-3 head that is supported")
    if (layers := layer.get("num_hidden_layers", 1)) != 1:
        raise ModelError(f"a head of {layers} layers is not supported; supported: EAGLE-3 heads of one layer")
    for key in REFUSED:
        if config.get(key):
            raise ModelError(f"the head's config.json: {key} = {config[key]!r} is not supported; supported: false")


def _match(field: str, head: int, target: int) -> None:
    if head != target:
        raise ModelError(
            f"the head's {field} is {head}, the target's is {target}; use a head that was trained for this target"
        )


def _taps(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The tapped layers. In `eagle_config` (SGLang) ids count layers; beside it (vLLM) states, the embedding first."""
    inner = config.get("eagle_config")
    ids = inner.get(TAPS) if isinstance(inner, Mapping) else None
    taps = _layers(ids) or tuple(i - 1 for i in _layers(config.get(TAPS)))
    if not taps:
        return default_taps(num_layers)
    if len(taps) != 3 or min(taps) < 0 or max(taps) >= num_layers:
        raise ModelError(f"the head asks for layers {list(taps)}; supported: three layers of the target's {num_layers}")
    return taps


def _layers(ids: Any) -> tuple[int, ...]:
    """The numbers of a list of layers, none where there is no list."""
    if ids is not None and not (isinstance(ids, (list, tuple)) and all(type(i) is int for i in ids)):
        raise ModelError(f"the head's config.json: {TAPS} = {ids!r} is refused; expected a list of whole numbers")
    return tuple(ids or ())
