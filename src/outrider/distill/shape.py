"""The shape of a new head: small enough that a drafted token costs a few percent of the target's step.

A draft step reads q, k, v, o, the MLP and the head's LM head (fc only runs for verified tokens). With two query heads
per KV head, an MLP as wide as the residual stream and 8192 tokens, that is 6.8 M weights for SmolLM2-135M: 5 % of the
134 M that one step of the target reads.
"""

from __future__ import annotations

from outrider.distill.options import DistillOptions
from outrider.models.eagle3 import Eagle3Spec, default_taps
from outrider.models.spec import DecoderSpec, Rope


def head_spec(target: DecoderSpec, options: DistillOptions) -> Eagle3Spec:
    """A head for a target: its widths, RoPE base and positions; KV heads as many as the target's, to point at them."""
    positions = options.max_positions or target.max_positions
    return Eagle3Spec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(options.vocab_size, target.num_tokens or target.vocab_size),
        num_heads=options.num_heads or min(target.num_heads, 2 * target.num_kv_heads),
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=options.intermediate_size or target.hidden_size,
        taps=head_taps(target, options),
        max_positions=positions,
        norm_eps=target.norm_eps,
        rope=_rope(target, positions, options.yarn_factor),
    )


def head_taps(target: DecoderSpec, options: DistillOptions) -> tuple[int, ...]:
    """The layers of the target whose states are captured and read by the head."""
    return options.taps or default_taps(target.num_layers)


def draft_weights(spec: Eagle3Spec) -> int:
    """Weights that one drafted token reads."""
    attention = 2 * spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    output = spec.num_heads * spec.head_dim * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return attention + output + mlp + spec.hidden_size * spec.draft_vocab_size


def target_weights(spec: DecoderSpec) -> int:
    """Weights that one step of the target reads."""
    attention = 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp) + spec.hidden_size * spec.vocab_size


def _rope(target: DecoderSpec, positions: int, yarn_factor: float) -> Rope:
    theta = target.rope.theta if target.rope else 10000.0
    if yarn_factor == 1:
        return Rope(theta=theta)
    scaling = {"factor": yarn_factor, "original_max_position_embeddings": positions / yarn_factor}
    return Rope(theta=theta, kind="yarn", scaling=scaling)
