"""The compiled decoder over slow layers gives the bits of resident KV, for every KV type and order of loads."""

from dataclasses import replace

import numpy as np
import pytest

from compiling import Stored
from faults import LazyTransfer, ShuffledTransfer
from outrider.memory.place import Layout, Need, Offload, PageMover, Rows
from outrider.memory.select import Chooser, PageSelector, PageSummaries, Sticky, View, float_rows, group_layers
from outrider.memory.tiers import DiskTier, make_codec
from outrider.models.compiled import CompiledDecoder
from outrider.models.spec import DecoderSpec
from outrider.types import Batch, Selection

PAGE, BUDGET, PROMPT, STEPS, NUM_PAGES = 4, 24, 50, 12, 40
SPEC = DecoderSpec("llama", 61, 32, 4, 4, 2, 16, 48, 512)
SLOW = (2, 3)
GROUPS = group_layers(SPEC.num_layers, 2)


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = {"attn_norm": (32,), "mlp_norm": (32,), "q": (64, 32), "k": (32, 32), "v": (32, 32), "o": (32, 64),
              "gate": (48, 32), "up": (48, 32), "down": (32, 48)}  # fmt: skip
    named = {"embed": (61, 32), "final_norm": (32,)}
    named |= {f"layers.{i}.{name}": shape for i in range(SPEC.num_layers) for name, shape in shapes.items()}
    return {
        name: Stored((rng.normal(size=shape) * 0.5 + (len(shape) == 1)).astype(np.float32))
        for name, shape in named.items()
    }


def planes(cache, layer):
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return [part[layer] for part in parts if part[layer].size]


class Run:
    """Greedy decoding of two sequences with a page selection made from the real keys, resident or offloaded."""

    def __init__(self, decoder, offload_to=None, mover=None):
        self.decoder, self.cache, self.mover = decoder, decoder.new_cache(NUM_PAGES, PAGE), mover
        self.tables = [np.arange(0, 20, dtype=np.int32), np.arange(39, 19, -1, dtype=np.int32)]
        rng = np.random.default_rng(1)
        self.tokens = [rng.integers(0, 61, PROMPT + s).tolist() for s in range(2)]
        self.chooser = self._chooser()
        self.logits = [self.prefill(s) for s in range(2)]
        self.offload = None
        if offload_to is not None:
            self._lower(offload_to)

    def _chooser(self):
        taps = (0, 1, 2, 3)
        summaries = PageSummaries(len(taps), NUM_PAGES, 2, PAGE, 16)
        return Chooser(PageSelector(summaries, GROUPS, 2), 2, 1, PAGE, Sticky(0.5))

    def slots(self, s, start, stop):
        entries = np.arange(start, stop)
        return (self.tables[s][entries // PAGE] * PAGE + entries % PAGE).astype(np.int32)

    def prefill(self, s):
        count = len(self.tokens[s])
        positions = np.arange(count, dtype=np.int32)
        batch = Batch(np.array(self.tokens[s], np.int32), positions, self.slots(s, 0, count),
                      np.array([0, count], np.int32),
                      np.zeros(1, np.int32), self.tables[s][None], np.array([count - 1], np.int32))  # fmt: skip
        result = self.decoder.forward(batch, self.cache)
        self.fold(self.slots(s, 0, count), self.slots(s, 0, count))
        self.tokens[s].append(int(result.best[0]))
        return result.logits[0]

    def fold(self, slots, slow_slots):
        """New keys into the summaries; those of slow layers are where slow layers keep them."""
        keys = []
        for layer in range(SPEC.num_layers):
            parts = planes(self.cache, layer)
            at = slow_slots if self.is_slow(layer) else slots
            keys.append(float_rows(parts[0], parts[-2], at, 16))
        self.chooser.selector.summaries.fold(slots, np.stack(keys))

    def is_slow(self, layer):
        return getattr(self, "offload", None) is not None and layer in SLOW

    def _lower(self, tier):
        kind = self.cache.dtype
        codec = make_codec(kind, kind, Rows(planes(self.cache, 0)).raw_bytes, PAGE, 16)
        layout = Layout(2, PAGE, NUM_PAGES, 2, BUDGET + 3, 2)
        pages = PageMover(tier(codec.stored_bytes, layout.tier_blocks(4)), self.mover, codec, layout, chunk=256)
        self.offload = Offload(pages, self.mover, layout, GROUPS)
        buffers = self.decoder.new_cache(layout.buffer_pages, PAGE)
        lengths = [len(tokens) - 1 for tokens in self.tokens]
        holders = [Need(s, self.tables[s], lengths[s], 0, None) for s in range(2)]
        full = np.concatenate([table[: length // PAGE] for table, length in zip(self.tables, lengths, strict=True)])
        for layer in SLOW:
            source = planes(self.cache, layer)
            self.offload.lower(layer, Rows(planes(buffers, layer)), Rows(source), full, holders)
            for plane in source:
                plane[:] = 0  # nothing is left behind
            self.cache.hold(layer, planes(buffers, layer))

    def step(self, rng):
        lengths = [len(tokens) - 1 for tokens in self.tokens]
        queries = rng.normal(size=(2, 4, 4, 16)).astype(np.float32)
        views = [View(s, lengths[s], 1, BUDGET, self.tables[s], queries[s]) for s in range(2)]
        entries = [self.chooser.choose(view) for view in views]
        slots = np.concatenate([self.slots(s, lengths[s], lengths[s] + 1) for s in range(2)])
        batch = Batch(np.array([tokens[-1] for tokens in self.tokens], np.int32), np.array(lengths, np.int32), slots,
                      np.array([0, 1, 2], np.int32), np.array(lengths, np.int32), np.stack(self.tables),
                      np.array([0, 1], np.int32), selection=self.chooser.join(entries))  # fmt: skip
        slow_slots, hook = slots, None
        if self.offload is not None:
            needs = [Need(s, self.tables[s], lengths[s], 1, entries[s]) for s in range(2)]
            step = self.offload.prepare(needs)
            slow_slots, hook, batch = step.view.slots, step.wait, replace(batch, slow=step.views)
        result = self.decoder.forward(batch, self.cache, hook)
        if self.offload is not None:
            assert not step.finish()
        self.fold(slots, slow_slots)
        for s in range(2):
            if self.offload is not None:
                self.offload.commit(s, self.tables[s], np.zeros(1, np.int32))
            self.tokens[s].append(int(result.best[s]))
        return result.logits


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("make", [lambda: ShuffledTransfer(2), LazyTransfer], ids=["shuffled", "lazy"])
def test_offloaded_layers_give_the_same_bits(weights, kv, make, tmp_path):
    """Every KV type, loads in any order, lengths that are no multiple of the page."""
    decoder = CompiledDecoder.build(SPEC, weights, dtype="float32", kv_dtype=kv, threads=1)
    mover, tiers = make(), []

    def tier(size, blocks):
        tiers.append(DiskTier(tmp_path, size, blocks))
        return tiers[0]

    resident, slow = Run(decoder), Run(decoder, tier, mover)
    outputs = []
    for run in (resident, slow):
        rng = np.random.default_rng(5)
        outputs.append(np.stack([run.step(rng) for _ in range(STEPS)]))
    assert (outputs[0] == outputs[1]).all()
    assert resident.tokens == slow.tokens
    summaries = [run.chooser.selector.summaries.bounds for run in (resident, slow)]
    assert (summaries[0] == summaries[1]).all()
    assert mover.account.loads > 10
    assert mover.account.stores > 3
    mover.close()
    tiers[0].close()


def test_a_budget_that_holds_everything_is_bitwise_full_attention(weights):
    """No selection at all is what the engine runs then; a selection of everything gives the same bits."""
    decoder = CompiledDecoder.build(SPEC, weights, dtype="float32", kv_dtype="float32", threads=1)
    run = Run(decoder)
    length = len(run.tokens[0]) - 1
    every = np.broadcast_to(np.arange(length, dtype=np.int32), (2, 1, 2, length))
    whole = Selection(np.ascontiguousarray(every), np.full((2, 1, 2), length, np.int32), GROUPS)
    outputs = []
    for selection in (None, whole):
        batch = Batch(np.array(run.tokens[0][-1:], np.int32), np.array([length], np.int32),
                      run.slots(0, length, length + 1), np.array([0, 1], np.int32),
                      np.array([length], np.int32), run.tables[0][None],
                      np.zeros(1, np.int32), selection=selection)  # fmt: skip
        outputs.append(decoder.forward(batch, run.cache).logits)
    assert (outputs[0] == outputs[1]).all()
