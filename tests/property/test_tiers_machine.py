"""Ten thousand random operations over tiers, transfers and layers: nothing is lost, torn, leaked or counted twice."""

import tracemalloc

import numpy as np
import pytest

from faults import FaultyDisk, LazyTransfer, ShuffledTransfer
from offloaded import HEADS, LAYERS, World, raw_bytes
from outrider.memory.transfer import Transfer


class Player:
    """Does one random thing after another to a world."""

    def __init__(self, world, seed):
        self.world, self.rng, self.next = world, np.random.default_rng(seed), 0
        self.counts = {}

    def play(self):
        world, lives = self.world, list(self.world.lives.values())
        moves = [("start", 2 * (len(lives) < 3)), ("step", 12 * bool(lives)), ("end", 1.2 * bool(lives)),
                 ("lower", 0.4), ("lift", 0.4), ("take", 0.5 * bool(lives))]  # fmt: skip
        weights = np.array([weight for _, weight in moves])
        name = moves[self.rng.choice(len(moves), p=weights / weights.sum())][0]
        if name == "start" and len(world.free) > 20:
            parent = lives[self.rng.integers(len(lives))] if lives and self.rng.random() < 0.5 else None
            world.start(self.next, int(self.rng.integers(1, 40)), parent)
            self.next += 1
        elif name == "step":
            some = [life for life in lives if self.rng.random() < 0.8] or lives
            for life in [life for life in some if life.length > 60]:
                world.end(life.number)
            some = [life for life in some if life.number in world.lives]
            if some and len(world.free) > 6:
                whole = [life.number for life in some if self.rng.random() < 0.2]
                world.step(some, int(self.rng.integers(6, 15)), int(self.rng.integers(1, 7)), whole=whole)
        elif name == "end":
            world.end(lives[self.rng.integers(len(lives))].number)
        elif name == "lower" and len(world.buffers) < LAYERS:
            world.lower(LAYERS - 1 - len(world.buffers))
        elif name == "lift" and world.buffers:
            world.lift(min(world.buffers))
        elif name == "take" and world.buffers:
            life = lives[self.rng.integers(len(lives))]
            world.take(life, max(world.buffers), int(self.rng.integers(life.length // 4 + 1)) * 4)
        else:
            name = "nothing"
        self.counts[name] = self.counts.get(name, 0) + 1


def settled(world):
    world.mover.drain()
    assert world.offload.pages.in_flight == 0
    found, total = world.balance()
    assert found == total
    pages = sum(world.holders.values())
    assert pages == sum(len(life.pages) for life in world.lives.values())
    assert len(world.free) + len(world.holders) == world.layout.num_pages


@pytest.mark.parametrize("kind", ["thread", "shuffled", "lazy", "disk"])
@pytest.mark.parametrize("operations", [300, pytest.param(2500, marks=pytest.mark.slow)])
def test_random_operations(kind, operations, tmp_path):
    """Ten thousand over the four movers and tiers; a tenth of that in the default run."""
    movers = {"shuffled": lambda: ShuffledTransfer(7, 0.0002), "lazy": LazyTransfer}
    tier = FaultyDisk(tmp_path, raw_bytes(), LAYERS * 60 * HEADS) if kind == "disk" else None
    world = World(movers.get(kind, Transfer)(), tier, seed=len(kind))
    world.lower(3)
    world.lower(2)
    player = Player(world, seed=len(kind))
    for number in range(operations):
        player.play()
        if number % 50 == 0:
            settled(world)
    settled(world)
    done = [player.counts.get(name, 0) for name in ("start", "step", "end", "lower", "lift", "take")]
    assert min(done) >= operations // 300
    assert world.staged > operations // 10
    assert world.checked > 5 * operations
    assert world.mover.account.failures == 0
    if kind == "shuffled":
        assert world.mover.reordered > 0
    for number in list(world.lives):
        world.end(number)
    settled(world)
    assert world.tier.held == 0
    world.mover.close()
    if tier:
        tier.close()


def test_memory_stays_flat():
    world = World(Transfer(), seed=1)
    player = Player(world, seed=1)
    for _ in range(150):
        player.play()
    world.mover.drain()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(250):
        player.play()
    for number in list(world.lives):
        world.end(number)
    world.mover.drain()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    world.mover.close()
    assert grown < 60_000
    assert not world.offload._sequences
    assert not world.mover._queue
