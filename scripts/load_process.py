"""The server's process, as scripts/load.py starts and watches it: memory, file descriptors, threads."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

POINTS = 60  # of a watch that are kept in the record
SLACK = 4  # descriptors or threads that may be there more than before


@dataclass(frozen=True)
class Sample:
    """The process at one moment. rss and kv are bytes; kv is what pages of keys and values have touched so far."""

    seconds: float
    rss: int
    kv: int
    descriptors: int
    threads: int


class Watch:
    """Looks at a process once in a while; `growth` is what it makes of that."""

    def __init__(self, pid: int | None, url: str, interval: float) -> None:
        self._pid, self._url, self._interval = pid, url, interval
        self._start = time.monotonic()
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Until cancelled; nothing where the process is not ours."""
        while self._pid is not None:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> Sample | None:
        """One sample. The connection is closed again, so that it is not counted the next time."""
        if self._pid is None:
            return None
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            kv = (await http.get("/stats")).json()["engine"]["kv_bytes_touched"]
        folder = Path(f"/proc/{self._pid}")
        pages = int((folder / "statm").read_text().split()[1])
        threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
        descriptors = len(list((folder / "fd").iterdir()))
        seconds = round(time.monotonic() - self._start, 1)
        self.samples.append(Sample(seconds, pages * os.sysconf("SC_PAGE_SIZE"), kv, descriptors, threads))
        return self.samples[-1]

    def piled_up(self) -> dict[str, int]:
        """Descriptors that are open though everybody has gone, and threads beyond those of the first half."""
        if not self.samples:
            return {}
        first, last = self.samples[0], self.samples[-1]
        threads = max(sample.threads for sample in self.samples[: len(self.samples) // 2 + 1])
        more = {"descriptors": last.descriptors - first.descriptors, "threads": last.threads - threads}
        return {name: max(0, count - SLACK) for name, count in more.items()}

    def report(self) -> dict[str, Any]:
        """Growth from the second quarter, when everything is warm, to the last, and some of the samples.

        The pool of KV pages takes memory as its pages are first used, up to the size that was configured and no
        further; a prefix cache uses all of it in time. `growth` is therefore that of the memory beside touched pages.
        """
        if len(self.samples) < 8:
            return {"samples": [asdict(sample) for sample in self.samples]}
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        every = -(-len(self.samples) // POINTS)
        return {
            "growth": share([s.rss - s.kv for s in early], [s.rss - s.kv for s in late]),
            "rss_growth": share([s.rss for s in early], [s.rss for s in late]),
            "kv_touched_growth_bytes": median(s.kv for s in late) - median(s.kv for s in early),
            "rss_peak_bytes": max(s.rss for s in self.samples),
            "descriptors": [max(s.descriptors for s in part) for part in (early, late)],
            "threads": [max(s.threads for s in part) for part in (early, late)],
            "samples": [asdict(sample) for sample in self.samples[::every]],
        }


def share(early: Sequence[int], late: Sequence[int]) -> float:
    """By which share the median has grown."""
    return round(median(late) / median(early) - 1, 4)


@contextmanager
def served(model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """Start `outrider serve` on a free port; gives its URL and process id."""
    command = [sys.executable, "-m", "outrider.cli.main", "serve", model, "--port", "0", *options]
    log = subprocess.Popen([*command, "--set", "log_level=info"], stderr=subprocess.PIPE, text=True)
    assert log.stderr is not None
    try:
        found = next((m for line in log.stderr if (m := re.search(r"running on (http://\S+?)\"", line))), None)
        if found is None:
            raise SystemExit("the server did not start")
        drain = subprocess.Popen(["cat"], stdin=log.stderr, stdout=subprocess.DEVNULL)  # keeps the pipe empty
        yield found[1], log.pid
        log.terminate()
        if log.wait(60) != 0:
            raise SystemExit(f"the server ended with status {log.returncode}")
        drain.wait(10)
    finally:
        log.kill()
