"""Small random models saved by transformers, and a driver that feeds a decoder in whatever pieces a test likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from outrider.models.spec import Decoder
from outrider.types import Batch, Selection

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_random(folder: Path, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """A model whose every parameter is random, biases and norms included, saved to the folder."""
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + ("norm" in name and name.endswith("weight")))
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5))
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return model


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of numbered words, so that the folder is a complete model."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def hf_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Logits of transformers for one text: [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()


@dataclass
class Driver:
    """Feeds one decoder; sequences share a cache whose pages are dealt out in no particular order."""

    decoder: Decoder
    page_size: int = 4
    num_pages: int = 96
    pages: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = self.decoder.new_cache(self.num_pages, self.page_size)
        self.free = list(np.random.default_rng(1).permutation(self.num_pages))

    def step(
        self,
        rows: Mapping[int, Sequence[int]],
        parents: Mapping[int, Sequence[int]] | None = None,
        selection: Selection | None = None,
        keep: bool = True,
    ):
        """One pass over the rows of each sequence; a sequence with parents is a tree. Logits of every row by sequence.

        keep: whether the rows become committed entries.
        """
        batch = self.batch(rows, parents or {}, selection)
        result = self.decoder.forward(batch, self.cache)
        self.result = result
        if keep:
            for sequence, tokens in rows.items():
                self.lengths[sequence] = self.lengths.get(sequence, 0) + len(tokens)
        starts = batch.row_starts
        return {s: result.logits[starts[i] : starts[i + 1]] for i, s in enumerate(rows)}

    def batch(self, rows, parents, selection=None) -> Batch:
        contexts = np.array([self.lengths.get(s, 0) for s in rows], dtype=np.int32)
        positions, slots, ancestors = [], [], []
        for (sequence, tokens), context in zip(rows.items(), contexts, strict=True):
            self._grow(sequence, context + len(tokens))
            tree = parents.get(sequence, range(-1, len(tokens) - 1))
            paths = paths_of(tree)
            positions += [context + len(path) - 1 for path in paths]
            slots += [self.slot(sequence, context + i) for i in range(len(tokens))]
            ancestors += [sum(1 << node for node in path) for path in paths]
        width = max(len(self.pages[s]) for s in rows)
        starts = np.cumsum([0] + [len(tokens) for tokens in rows.values()])
        return Batch(
            tokens=np.concatenate([np.asarray(t) for t in rows.values()]).astype(np.int32),
            positions=np.array(positions, dtype=np.int32),
            slots=np.array(slots, dtype=np.int32),
            row_starts=starts.astype(np.int32),
            contexts=contexts,
            pages=np.array([self.pages[s] + [0] * (width - len(self.pages[s])) for s in rows], dtype=np.int32),
            logit_rows=np.arange(starts[-1], dtype=np.int32),
            ancestors=np.array(ancestors, dtype=np.uint64) if parents else None,
            selection=selection,
        )

    def slot(self, sequence: int, entry: int) -> int:
        return self.pages[sequence][entry // self.page_size] * self.page_size + entry % self.page_size

    def _grow(self, sequence: int, entries: int) -> None:
        pages = self.pages.setdefault(sequence, [])
        while len(pages) * self.page_size < entries:
            pages.append(int(self.free.pop()))


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Root-to-node paths of a tree, by node; parents come first."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def cut(driver: Driver, sequence: int, tokens: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Logits of one sequence fed in chunks of these sizes, the last one repeated as often as needed."""
    out, start, sizes = [], 0, list(sizes)
    while start < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(driver.step({sequence: tokens[start : start + size]})[sequence])
        start += size
    return np.concatenate(out)
