"""A trained head as a folder that this and other engines load: weights, config, card."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.distill.batches import Scale
from outrider.distill.files import full_disk_told, replacing
from outrider.distill.initial import fold_scale
from outrider.errors import ModelError
from outrider.models.eagle3 import Eagle3Head
from outrider.models.eagle3_files import load_head, save_head
from outrider.models.spec import DecoderSpec


def export_head(head: Eagle3Head, scale: Scale, folder: Path, target: DecoderSpec) -> Eagle3Head:
    """Write the head in bf16 as the public EAGLE-3 layout, read it again and check that nothing was lost."""
    final = copy.deepcopy(head).cpu().eval()
    fold_scale(final, scale)
    final = final.to(torch.bfloat16)
    with full_disk_told(folder):
        save_head(final, folder)
    again = load_head(folder, target)
    stored, read = final.state_dict(), again.state_dict()
    if any(not torch.equal(stored[name].float(), read[name].float()) for name in stored):
        raise ModelError(f"{folder} does not read as it was written; check the disk and export again")
    return again


def size_of(head: Eagle3Head) -> int:
    """Bytes of the exported tensors."""
    return sum(tensor.nbytes for tensor in head.state_dict().values())


def write_card(folder: Path, name: str, facts: Mapping, scores: Mapping[str, Any], settings: Mapping) -> None:
    """A drafter's README.md: what it is, how it was made, how well it drafts, and its licence."""
    rows = [_row(domain, score) for domain, score in scores.items()]
    text = "\n".join(
        [
            f"# {name}",
            "",
            "A drafter, distilled with `outrider distill` from the target's own answers.",
            "",
            *[f"* {key}: {value}" for key, value in facts.items()],
            "",
            "Acceptance on held-out prompts, greedy, chains of 4 tokens (acceptance length = 1 + accepted / drafts):",
            "",
            "| kind | prompts | acceptance length | 95 % interval | acceptance of each position once reached |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Settings:",
            "",
            "```json",
            json.dumps(settings, indent=1),
            "```",
            "",
        ]
    )
    with replacing(folder / "README.md") as partial:
        partial.write_text(text, encoding="utf-8")


def _row(domain: str, score: Mapping[str, Any]) -> str:
    (low, high), positions = score["interval"], " ".join(f"{share:.2f}" for share in score["conditional"])
    return (
        f"| {domain} | {score['prompts']} | {score['acceptance_length']:.2f} | {low:.2f} - {high:.2f} | {positions} |"
    )
