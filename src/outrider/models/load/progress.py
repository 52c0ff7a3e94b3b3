"""How downloads report what they do, and a bar on stderr that listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with what is being done, bytes done and bytes in all.
Progress = Callable[[str, int, int], None]


def silent(message: str, done: int, total: int) -> None:
    """Say nothing."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr that appears with the first report and is gone at the end; in a log, a line per step."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    if not bar.console.is_terminal:
        yield _line_per_step()
        return

    def report(message: str, done: int, total: int) -> None:
        if not bar.task_ids:
            bar.start()
        task = bar.task_ids[0] if bar.task_ids else bar.add_task(message)
        bar.update(task, description=message, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.task_ids:
            bar.stop()


def _line_per_step() -> Progress:
    said: set[str] = set()

    def report(message: str, done: int, total: int) -> None:
        if message not in said:
            said.add(message)
            print(f"{message} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)

    return report
