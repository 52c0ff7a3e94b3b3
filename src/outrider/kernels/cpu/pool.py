"""The threads that run a compiled step together: one pool per thread count and process, one job at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from outrider.errors import ConfigError

_POOLS: dict[tuple[int, int], Pool] = {}
_POOLS_LOCK = threading.Lock()
_MOST = 256


class Pool:
    """`run(job)` calls job(member) on every member at once; member 0 is the calling thread.

    Jobs must meet at their end (machine.meet), so that no member is still at work when `run` returns.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._job: Callable[[int], None] = _nothing
        self._lock = threading.Lock()
        self._starts = [threading.Semaphore(0) for _ in range(members - 1)]
        for index, start in enumerate(self._starts, 1):
            threading.Thread(target=self._serve, args=(index, start), name=f"outrider-{index}", daemon=True).start()

    def run(self, job: Callable[[int], None]) -> None:
        """Run one job; calls from several threads take turns."""
        with self._lock:
            self._job = job
            for start in self._starts:
                start.release()
            job(0)

    def _serve(self, index: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            self._job(index)


def _nothing(member: int) -> None:
    pass


def pool(members: int) -> Pool:
    """The process's pool of so many members; a forked child gets its own."""
    with _POOLS_LOCK:
        key = (os.getpid(), members)
        if key not in _POOLS:
            _POOLS[key] = Pool(members)
        return _POOLS[key]


def usable_threads(wanted: int | None = None) -> int:
    """`wanted`, or the cores that this process may use: its affinity, lowered by a cgroup's quota."""
    if wanted is not None:
        if not 1 <= wanted <= _MOST:
            raise ConfigError(f"threads = {wanted} is refused; use 1 to {_MOST}", "threads")
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(cores, cores if quota is None else int(quota + 0.5), _MOST))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the container may use on average; None: no limit (cgroup v2, then v1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:
        return None
