"""What a distillation run is: every setting with its default, and the refusal of what cannot work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from outrider.errors import ConfigError

Domain = Literal["all", "chat", "maths", "code"]
Kind = Literal["head", "model", "early-exit"]
Precision = Literal["auto", "fp32", "bf16"]

#: Settings that may differ between a run and its resumption: they change neither the data nor the weights.
FREE = frozenset({"checkpoint_every", "eval_prompts", "engine_prompts", "data_minutes"})

#: Settings of a run's length: changed, it goes on from its checkpoint to the new end.
LENGTH = frozenset({"epochs", "minutes"})


@dataclass(frozen=True)
class DistillOptions:
    """Settings of one run. Training defaults are those of the calibration in docs/distillation.md."""

    seed: int = 0
    kind: Kind = "head"  # an EAGLE-3 head, a small decoder of the target's layers, or its first ones as an early exit
    domain: Domain = "all"  # train on the prompts of this domain; "all": a generalist

    # Answers
    max_tokens: int = 256  # of one answer
    max_prompt: int = 1024  # tokens; longer prompts are left out
    temperature: float = 0.0  # of the answers; 0 is what greedy decoding will ask for
    batch: int = 24  # sequences that are answered together
    shard_prompts: int = 64  # prompts per shard; with max_tokens it bounds a shard's bytes
    data_minutes: float | None = None  # of answering, at most; None: all prompts
    holdout: int = 16  # one prompt in this many is kept for evaluation
    eval_prompts: int = 60  # held-out prompts per domain whose answers are evaluated
    engine_prompts: int = 2  # of these, prompts per domain that are answered again in the engine with the head drafting

    # Shape of the head; None: a share of the target's that keeps a draft token near 5 % of its step
    vocab_size: int = 8192  # tokens that the head can draft
    num_heads: int | None = None  # query heads
    intermediate_size: int | None = None  # width of the MLP
    taps: tuple[int, ...] = ()  # three layers of the target; empty: the published choice
    max_positions: int | None = None  # None: the target's
    yarn_factor: float = 1.0  # above 1: positions are stretched for contexts longer than the training's

    # Shape of a small decoder or early exit
    layers: tuple[int, ...] = ()  # of the target; empty: a fifth of them, or the first third for an early exit
    mlp_share: float = 0.5  # of the MLP's neurons that a small decoder keeps

    # Training
    epochs: float = 3.0  # passes over the data, at most
    minutes: float | None = None  # of training, at most; turned into a number of updates at the start
    tokens_per_update: int = 400
    precision: Precision = "auto"  # of a head's products in training; auto: bf16 where the machine multiplies it itself
    unroll: int = 3  # steps the head is fed its own states, from `unroll_from` on; one before
    unroll_from: float = 0.45  # share of the updates
    step_decay: float = 0.8  # weight of unrolled step i is step_decay ** i
    lr: float = 2.5e-3
    lm_head_lr: float = 0.3  # times lr
    warmup: int = 15  # updates
    final_lr: float = 0.03  # times lr, where the cosine ends
    weight_decay: float = 0.01
    clip: float = 1.0
    dropout: float = 0.1
    clamp: float = 8.0  # states whose RMS is above this many times their layer's are scaled down to it
    l_attn: float = 0.0  # weight of the attention alignment; 0: off
    l_attn_top: int = 32  # positions per query head of the target
    checkpoint_every: int = 200  # updates
    init: str = ""  # folder of a head to start from; its vocabulary and shape are kept

    def __post_init__(self) -> None:
        for name, ok, rule in self._rules():
            if not ok:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is refused; {rule}", name)

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("kind", self.kind in get_args(Kind), f"use one of {', '.join(get_args(Kind))}"),
            ("init", not self.init or self.kind == "head", "only heads are trained further"),
            ("mlp_share", 0 < self.mlp_share <= 1, "use a share above 0 and at most 1"),
            ("domain", self.domain in get_args(Domain), f"use one of {', '.join(get_args(Domain))}"),
            ("max_tokens", self.max_tokens >= 8, "use 8 or more"),
            ("batch", self.batch >= 1, "use 1 or more"),
            ("shard_prompts", self.shard_prompts >= 1, "use 1 or more"),
            ("holdout", self.holdout >= 2, "use 2 or more: some prompts are for training, some for evaluation"),
            ("vocab_size", self.vocab_size >= 1, "use 1 or more"),
            ("taps", len(self.taps) in (0, 3), "give three layers, low to high"),
            ("yarn_factor", self.yarn_factor >= 1, "use 1 (off) or more"),
            ("epochs", self.epochs > 0, "use a number above 0"),
            ("minutes", self.minutes is None or self.minutes > 0, "use a number above 0"),
            ("precision", self.precision in get_args(Precision), f"use one of {', '.join(get_args(Precision))}"),
            ("tokens_per_update", self.tokens_per_update >= 1, "use 1 or more"),
            ("unroll", 1 <= self.unroll <= 8, "use 1 to 8"),
            ("dropout", 0 <= self.dropout < 1, "use 0 to 0.9"),
            ("l_attn", self.l_attn >= 0, "use 0 (off) or more"),
            ("checkpoint_every", self.checkpoint_every >= 1, "use 1 or more"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "taps": list(self.taps), "layers": list(self.layers)}


def check_same(stored: dict[str, Any], given: dict[str, Any], stage: str) -> None:
    """Refuse to go on with a run that was started with other settings: it would be neither of the two."""
    for name in sorted(set(stored) | set(given)):
        was, now = stored.get(name), given.get(name)
        if name in FREE | LENGTH or was == now:
            continue
        if name == "shards":
            raise ConfigError(
                f"the {stage} in this folder were made from {len(was or ())} shards of answers, and these are others "
                f"({len(now or ())}); remove its training/ to train anew, or use another --out",
                name,
            )
        raise ConfigError(
            f"the {stage} in this folder were made with {name} = {was!r}, now it is {now!r}; use the same, or another "
            "--out",
            name,
        )
