"""A training run on disk: weights, optimiser moments and progress in one file, replaced whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.distill.files import is_written, read_tensors, write_tensors
from outrider.distill.options import LENGTH, check_same

NAME = "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """How far a run is: the next update, how many there will be, and the figures so far."""

    updates: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.AdamW, progress: Progress, plan: dict[str, Any]
) -> None:
    """Replace the checkpoint."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tensors: dict[str, Tensor] = {f"module.{name}": value.detach().cpu() for name, value in module.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for moment in MOMENTS:
            tensors[f"{moment}.{names[id(parameter)]}"] = state[moment].cpu()
    write_tensors(folder / NAME, tensors, {"progress": vars(progress), "plan": plan})


def load_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.AdamW, plan: dict[str, Any]
) -> Progress | None:
    """Bring module and optimiser to where an interrupted run was; None where there is no checkpoint.

    Its number of updates is 0, which asks for a new count, where the length of the run was changed. ConfigError where
    it belongs to a run with other settings, ChecksumError where it is damaged.
    """
    if not is_written(folder / NAME):
        return None
    tensors, note = read_tensors(folder / NAME)
    check_same(note["plan"], plan, "checkpoints")
    progress = Progress(**note["progress"])
    if any(note["plan"].get(name) != plan.get(name) for name in LENGTH):
        progress.updates = 0
    module.load_state_dict({name: tensors[f"module.{name}"] for name in module.state_dict()})
    for name, parameter in module.named_parameters():
        if f"exp_avg.{name}" in tensors:
            moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(progress.step)), **moments}
    return progress
