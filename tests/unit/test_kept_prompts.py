"""Prompts on disk: the bound on their size, and what full disks, damage and kills leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.memory.keep import KeptPrompts, Prompt
from outrider.memory.report import ContextReport, KeptReport
from outrider.memory.tiers.saved import SavedPrefixes

SIZE = 4000  # bytes of the tensor in a prompt's file
FILE = 4400  # at least what its file takes
KILLED = """
import os, signal, sys
import numpy as np
import outrider.memory.tiers.saved as saved

def half(arrays, path, metadata):
    write(arrays, path, metadata=metadata)
    if sys.argv[2] == "half":
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

write, saved.save_file = saved.save_file, half
if sys.argv[2] == "whole":
    saved._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
saved.SavedPrefixes(sys.argv[1], "m").save([1, 2], {"k": np.zeros(1000, np.float32)})
"""
FULL = """
import resource, sys
import numpy as np
from outrider.memory.keep import KeptPrompts, Prompt

prompts = KeptPrompts(sys.argv[1], "m", 1, 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for number, size in enumerate((4000, 40000, 4000)):
    prompts.keep([number], lambda: Prompt([[np.zeros(size // 4, np.float32)]], []))
print(prompts.written, prompts.failed, sum(prompts.find([number]) for number in range(3)))
"""


def run(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, timeout=60)


def prompt(value: int, size: int = SIZE) -> Prompt:
    return Prompt([[np.full(size // 4, value, np.float32)]], [])


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def age(folder: Path) -> None:
    """Everything that is there was used a while ago, in the same order."""
    for number, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1000 + number, 1000 + number))


def test_the_least_recently_used_prompts_make_room(tmp_path) -> None:
    prompts = KeptPrompts(tmp_path, "m", 1, 3 * FILE)
    for number in range(3):
        prompts.keep([number], lambda number=number: prompt(number))
        age(tmp_path)
    assert prompts.load([0]) is not None  # used: now 1 is the oldest
    age(tmp_path)
    prompts.keep([1], lambda: pytest.fail("it is there"))  # answered again: used, too
    age(tmp_path)
    prompts.keep([3], lambda: prompt(3))
    assert [prompts.find([number]) for number in range(4)] == [1, 1, 0, 1]
    assert total(tmp_path) <= 3 * FILE
    report = prompts.report()
    assert (report.files, report.written, report.removed, report.found) == (3, 4, 1, 1)
    assert report.bytes == total(tmp_path) <= report.limit == 3 * FILE
    assert [file.tokens for file in prompts.files()] == [1, 1, 1]


def test_the_bound_holds_at_any_time_and_for_all_models_together(tmp_path) -> None:
    rng = np.random.default_rng(0)
    stores = [SavedPrefixes(tmp_path, name, 5 * FILE) for name in "ab"]
    for number in range(60):
        size = int(rng.integers(1, 3)) * SIZE
        stores[number % 2].save([number], {"k": np.zeros(size // 4, np.float32)})
        assert total(tmp_path) <= 5 * FILE
        assert stores[number % 2].find([number]) == 1, "what was just written is there"
    assert sum(store.removed for store in stores) > 40
    assert {file.model for file in stores[0].files()} == {store.model for store in stores}
    assert len(SavedPrefixes(tmp_path, "c", 2 * FILE).files()) <= 2, "a start with a lower bound keeps it"


def test_a_prompt_that_is_larger_than_the_bound_costs_nobody_its_place(tmp_path) -> None:
    prompts = KeptPrompts(tmp_path, "m", 1, 2 * FILE)
    prompts.keep([1], lambda: prompt(1))
    prompts.keep([2], lambda: prompt(2, 4 * SIZE))
    assert (prompts.find([1]), prompts.find([2])) == (1, 0)
    assert (prompts.report().too_large, prompts.report().removed) == (1, 0)


@pytest.mark.parametrize("when", ["half", "whole"])
def test_a_kill_leaves_nothing_that_could_be_found(tmp_path, when) -> None:
    """In the middle of the file, or when it is whole and not yet named: the next start removes it at once."""
    assert run(KILLED, tmp_path, when).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    store = SavedPrefixes(tmp_path, "m")
    assert store.find([1, 2]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_is_writing_is_left_alone(tmp_path) -> None:
    here = tmp_path / f"outrider-prefix-x-2-y.{os.getpid()}-0a.tmp"
    odd = tmp_path / "outrider-prefix-x-2-y.tmp"
    for path in (here, odd):
        path.write_bytes(b"half")
    SavedPrefixes(tmp_path, "m")
    assert here.exists()
    assert not odd.exists()


def test_a_full_disk_loses_the_new_prompt_alone(tmp_path) -> None:
    done = run(FULL, tmp_path)
    assert done.stdout.split() == ["2", "1", "2"], done.stderr
    assert "cannot be saved" in done.stderr
    assert len(list(tmp_path.iterdir())) == 2, "no half file is left"


def test_a_damaged_prompt_is_deleted_and_counted(tmp_path) -> None:
    prompts = KeptPrompts(tmp_path, "m", 1, 1 << 20)
    prompts.keep([1, 2], lambda: prompt(1))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    assert prompts.load([1, 2]) is None
    assert (prompts.report().damaged, prompts.report().files, prompts.find([1, 2])) == (1, 0, 0)
    prompts.keep([1, 2], lambda: prompt(1))
    assert prompts.load([1, 2]) is not None


def test_a_file_of_other_arrays_is_damaged_too(tmp_path) -> None:
    """Its checksum is right, but nothing in it is a prompt's."""
    SavedPrefixes(tmp_path, "m").save([1, 2], {"held.0": np.zeros(4, np.float32)})
    prompts = KeptPrompts(tmp_path, "m", 1, 1 << 20)
    assert prompts.load([1, 2]) is None
    assert (prompts.report().damaged, prompts.find([1, 2])) == (1, 0)


def test_a_damaged_file_that_cannot_be_deleted_is_not_looked_for_again(tmp_path, monkeypatch) -> None:
    prompts = KeptPrompts(tmp_path, "m", 1, 1 << 20)
    prompts.keep([1, 2], lambda: prompt(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))

    def refuse(*given: object, **named: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert prompts.load([1, 2]) is None
    assert prompts.find([1, 2]) == 0


def test_writers_of_the_same_prompt_do_not_meet(tmp_path) -> None:
    stores = [SavedPrefixes(tmp_path, "m") for _ in range(4)]
    values = {"k": np.arange(50_000, dtype=np.float32)}
    threads = [threading.Thread(target=store.save, args=([1], values)) for store in stores for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stores[0].load([1])["k"] == values["k"]).all()
    assert len(list(tmp_path.iterdir())) == 1


def test_metrics_count_them_and_are_silent_where_none_are_kept() -> None:
    pytest.importorskip("prometheus_client")
    from outrider.server.metrics import EngineCollector

    class Engine:
        kept: KeptReport | None = KeptReport(files=3, bytes=900, limit=1000, removed=7, damaged=1)

        def stats(self) -> dict[str, Any]:
            return {"context": asdict(ContextReport(kept=self.kept))}

    engine: Any = Engine()
    found = {s.name: s.value for metric in EngineCollector(engine).collect() for s in metric.samples}
    assert (found["outrider:kept_prompts"], found["outrider:kept_prompts_bytes"]) == (3, 900)
    assert (found["outrider:kept_prompts_removed_total"], found["outrider:kept_prompts_damaged_total"]) == (7, 1)
    engine.kept = None
    assert not [metric.name for metric in EngineCollector(engine).collect() if "kept" in metric.name]


def test_what_selection_holds_comes_back_beside_the_keys_and_values() -> None:
    planes = [[np.full((3, 2), layer * 10 + kind) for kind in range(2)] for layer in range(12)]
    held = [np.arange(3), np.arange(6).reshape(3, 2)]
    again = Prompt.of(Prompt(planes, held).named())
    assert all((a == b).all() for a, b in zip(again.held, held, strict=True))
    assert all(
        (a == b).all()
        for ours, theirs in zip(again.planes, planes, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert again.after(2).held[1].tolist() == [[4, 5]]
    assert again.after(1).planes[3][1].shape == (2, 2)
