"""Threads: how many, how they meet, and how calls from several Python threads take turns."""

import threading

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.kernels.cpu import pool as pools
from outrider.kernels.cpu.isa import available, resolve
from outrider.kernels.cpu.machine import compiled, i64, meet, share
from outrider.kernels.cpu.workspace import address


@compiled
def rounds(sync, marks, member, members, count):
    """In every round write one's mark, meet, and count the others' marks of this round."""
    seen = 0
    for turn in range(1, count + 1):
        i64(marks)[member] = turn
        meet(sync, members)
        for other in range(members):
            seen += i64(marks)[other] == turn
        meet(sync, members)
    i64(marks)[members + member] = seen
    meet(sync, members)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_nobody_passes_a_barrier_before_all_have_come(members):
    sync, marks = np.zeros(16, np.int64), np.zeros(2 * members, np.int64)
    pools.pool(members).run(lambda member: rounds(address(sync), address(marks), member, members, 200))
    assert marks[members:].tolist() == [200 * members] * members


def test_jobs_from_several_threads_take_turns():
    members, results = 2, []

    def call() -> None:
        sync, marks = np.zeros(16, np.int64), np.zeros(2 * members, np.int64)
        for _ in range(5):
            pools.pool(members).run(lambda member: rounds(address(sync), address(marks), member, members, 20))
            results.append(marks[members:].tolist())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert results == [[40, 40]] * 15


def test_shares_cover_everything_once():
    for total in (0, 1, 7, 64):
        for members in (1, 2, 3, 5):
            ranges = [range(*share(total, member, members)) for member in range(members)]
            assert [i for part in ranges for i in part] == list(range(total))


def test_the_thread_count_follows_affinity_and_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(pools.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for text, wanted in (("max 100000", 8), ("150000 100000", 2), ("400000 100000", 4), ("20000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        quota = pools._cgroup_quota(tmp_path)
        monkeypatch.setattr(pools, "_cgroup_quota", lambda _, quota=quota: quota)
        assert pools.usable_threads() == wanted
        monkeypatch.undo()
        monkeypatch.setattr(pools.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert pools.usable_threads(3) == 3
    with pytest.raises(ConfigError, match="threads = 0"):
        pools.usable_threads(0)


def test_the_path_is_the_best_or_the_one_asked_for():
    assert resolve("") == resolve("auto") == available()[-1]
    assert resolve("generic") == "generic"
    with pytest.raises(ConfigError, match="OUTRIDER_CPU"):
        resolve("sse9")
