"""Tiers: what is written comes back, and what cannot come back is said so."""

import errno
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from faults import FaultyDisk
from outrider.errors import CapacityError, ConfigError, TransferError
from outrider.memory.tiers import DiskTier, HostTier, LostBlocksError, make_codec
from outrider.memory.tiers.base import runs
from outrider.memory.tiers.codec import from_bfloat16, to_bfloat16
from outrider.memory.tiers.saved import SavedPrefixes
from outrider.memory.tiers.scratch import PATTERN, ScratchFile, sweep

SIZE = 512
RNG = np.random.default_rng(0)


def some(count, size=SIZE):
    return RNG.integers(0, 256, (count, size), dtype=np.uint8)


def numbers(*blocks):
    return np.array(blocks, np.int64)


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    made = HostTier(SIZE, 100) if request.param == "host" else DiskTier(tmp_path, SIZE, 100)
    yield made
    made.close()
    made.close()


@pytest.fixture
def disk(tmp_path):
    made = FaultyDisk(tmp_path, SIZE, 100)
    yield made
    made.close()


def fetch(tier, blocks):
    out = np.zeros((len(blocks), tier.block_bytes), np.uint8)
    tier.read(blocks, out)
    return out


def test_blocks_come_back_in_any_order_and_are_replaced(tier):
    blocks, data = numbers(7, 3, 4, 5, 99, 0), some(6)
    tier.write(blocks, data)
    assert tier.held == 6
    assert (fetch(tier, blocks) == data).all()
    assert (fetch(tier, blocks[::-1]) == data[::-1]).all()
    again = some(1)
    tier.write(numbers(4), again)
    assert tier.held == 6
    assert (fetch(tier, numbers(3, 4, 5)) == [data[1], again[0], data[3]]).all()
    assert fetch(tier, numbers()).shape == (0, SIZE)


def test_what_was_never_written_or_was_dropped_is_lost(tier):
    tier.write(numbers(1, 2), some(2))
    tier.drop(numbers(2, 50))
    assert tier.held == 1
    with pytest.raises(LostBlocksError, match="never written") as caught:
        fetch(tier, numbers(1, 2, 3))
    assert caught.value.blocks == (2, 3)
    assert isinstance(caught.value, TransferError)


def test_a_tier_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        HostTier(SIZE, 0)
    with pytest.raises(ConfigError):
        DiskTier(tmp_path, SIZE, 0)


def test_host_memory_can_be_pinned_by_its_owner():
    shapes = []

    def allocate(shape):
        shapes.append(shape)
        return np.empty(shape, np.uint8)

    HostTier(SIZE, 10, allocate)
    assert shapes == [(10, SIZE)]


def test_runs_join_neighbours():
    assert runs(numbers(3, 4, 5, 9, 8, 9)) == [(0, 3), (3, 4), (4, 6)]
    assert runs(numbers()) == []


# ---- faults of the disk


def test_short_transfers_are_continued(disk):
    disk.short = True
    data = some(5)
    disk.write(numbers(1, 2, 3, 8, 9), data)
    assert (fetch(disk, numbers(1, 2, 3, 8, 9)) == data).all()
    assert disk.hits > 10


def test_a_file_that_ends_early_is_a_lost_block(disk):
    disk.write(numbers(1), some(1))
    disk.ends_early = True
    with pytest.raises(LostBlocksError, match="short read"):
        fetch(disk, numbers(1))
    disk.ends_early = False
    fetch(disk, numbers(1))


def test_a_failing_disk_is_a_lost_block_and_not_a_signal(disk):
    disk.write(numbers(1), some(1))
    disk.read_error = True
    with pytest.raises(LostBlocksError, match="Input/output error"):
        fetch(disk, numbers(1))


def test_a_truncated_file_is_a_lost_block(disk):
    disk.write(numbers(1), some(1))
    os.truncate(disk.path, SIZE + 10)
    with pytest.raises(LostBlocksError, match="short read"):
        fetch(disk, numbers(1))


def test_a_corrupt_block_is_named_and_its_neighbours_are_fine(disk):
    data = some(3)
    disk.write(numbers(4, 5, 6), data)
    disk.flip(5)
    with pytest.raises(LostBlocksError, match="corrupt") as caught:
        fetch(disk, numbers(4, 5, 6))
    assert caught.value.blocks == (5,)
    assert (fetch(disk, numbers(4, 6)) == data[[0, 2]]).all()
    disk.write(numbers(5), data[1:2])
    assert (fetch(disk, numbers(5)) == data[1]).all()


def test_a_lost_write_is_noticed(disk):
    """The file holds an older block in perfect order: a checksum stored beside it would agree."""
    old, new = some(1), some(1)
    disk.write(numbers(5), old)
    disk.write(numbers(5), new)
    disk.undo(5, old[0])
    with pytest.raises(LostBlocksError, match="corrupt"):
        fetch(disk, numbers(5))


def test_blocks_that_changed_places_are_noticed(disk):
    data = some(2)
    disk.write(numbers(1, 2), data)
    disk.undo(1, data[1])
    with pytest.raises(LostBlocksError):
        fetch(disk, numbers(1))


def test_a_full_disk_is_a_clear_error_and_loses_only_that_write(disk):
    kept = some(1)
    disk.write(numbers(1), kept)
    disk.full_after = 1
    with pytest.raises(CapacityError, match=r"No space left.*free space"):
        disk.write(numbers(3, 7), some(2))
    with pytest.raises(LostBlocksError):
        fetch(disk, numbers(3))
    assert (fetch(disk, numbers(1)) == kept).all()
    disk.full_after = None
    disk.write(numbers(3), kept)
    assert (fetch(disk, numbers(3)) == kept).all()


def test_no_room_to_grow_is_a_clear_error(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, SIZE, 100)

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="no room for"):
        tier.write(numbers(1), some(1))
    tier.close()


def test_file_systems_that_cannot_reserve_are_used_all_the_same(tmp_path, monkeypatch):
    def refuse(fd, offset, size):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    tier, data = DiskTier(tmp_path, SIZE, 100), some(1)
    tier.write(numbers(9), data)
    assert (fetch(tier, numbers(9)) == data).all()
    tier.close()


# ---- the file itself


def test_the_file_is_private_and_gone_after_close(tmp_path):
    tier = DiskTier(tmp_path / "deep" / "er", SIZE, 100)
    tier.write(numbers(0), some(1))
    assert tier.path.stat().st_mode & 0o777 == 0o600
    assert tier.path.stat().st_size == 100 * SIZE
    tier.close()
    assert list((tmp_path / "deep" / "er").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_path"):
        DiskTier(tmp_path / "file" / "below", SIZE, 100)


def test_live_files_survive_a_sweep_and_strangers_are_left_alone(tmp_path):
    mine = ScratchFile(tmp_path)
    (tmp_path / "notes.bin").write_text("mine")
    (tmp_path / "outrider-kv-1-dead.bin").write_text("left behind")
    assert [path.name for path in sweep(tmp_path)] == ["outrider-kv-1-dead.bin"]
    assert mine.path.exists()
    assert (tmp_path / "notes.bin").exists()
    mine.close()


CHILD = """
    import os, sys, numpy as np
    from outrider.memory.tiers import DiskTier
    tier = DiskTier({folder!r}, 4096, 10000)
    print("ready", flush=True)
    block = 0
    while {forever}:
        tier.write(np.arange(block % 9000, block % 9000 + 64), np.full((64, 4096), block % 256, np.uint8))
        block += 64
"""


def child(folder, forever):
    code = textwrap.dedent(CHILD).format(folder=str(folder), forever=forever)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_process_killed_while_writing_leaves_nothing_for_long(tmp_path):
    with child(tmp_path, True) as process:
        assert process.stdout.readline() == "ready\n"
        assert len(list(tmp_path.glob(PATTERN))) == 1
        beside = DiskTier(tmp_path, SIZE, 10)  # another live process does not lose its file
        assert len(list(tmp_path.glob(PATTERN))) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.glob(PATTERN))) == 2
    after = DiskTier(tmp_path, SIZE, 10)
    assert {path.name for path in tmp_path.iterdir()} == {beside.path.name, after.path.name}
    beside.close()
    after.close()


def test_an_ordinary_exit_removes_the_file(tmp_path):
    with child(tmp_path, False) as process:
        assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_remove_its_parents_file(tmp_path):
    tier = DiskTier(tmp_path, SIZE, 10)
    tier.write(numbers(1), some(1))
    code = f"""
        import os, sys
        from outrider.memory.tiers.scratch import ScratchFile
        file = ScratchFile({str(tmp_path)!r})
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(file.path.exists())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    tier.close()


# ---- codecs


def raw(values):
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


@pytest.mark.parametrize("fast", ["float32", "bfloat16", "int8"])
def test_as_it_is_means_bitwise(fast):
    data = some(3, 160)
    for slow in ("auto", fast):
        codec = make_codec(fast, slow, 160, 4, 16)
        assert codec.stored_bytes == 160
        assert (codec.decode(codec.encode(data)) == data).all()


def test_bfloat16_is_torchs_rounding():
    torch = pytest.importorskip("torch")
    values = np.concatenate([RNG.normal(size=2000), [0, -0.0, 1e-40, 3e38, np.inf, -np.inf, np.nan]]).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    assert np.array_equal(from_bfloat16(to_bfloat16(values)), expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("fast", "slow", "error"), [("float32", "bfloat16", 2**-8), ("float32", "int8", 0.5), ("bfloat16", "int8", 0.6)]
)
def test_smaller_types_round_once_and_carry_their_scales(fast, slow, error):
    """The scales travel with the values, whatever the size of the rows."""
    values = (RNG.normal(size=(5, 2, 4, 16)) * 10.0 ** RNG.integers(-3, 4, (5, 2, 4, 1))).astype(np.float32)
    values[0, 0, 0] = 0
    data = raw(to_bfloat16(values) if fast == "bfloat16" else values)
    codec = make_codec(fast, slow, data.shape[1], 4, 16)
    stored = codec.encode(data)
    assert stored.shape == (5, codec.stored_bytes)
    assert codec.stored_bytes < codec.raw_bytes == data.shape[1]
    once = codec.decode(stored)
    back = from_bfloat16(once.view(np.uint16)) if fast == "bfloat16" else once.view(np.float32)
    unit = np.abs(values) if slow == "bfloat16" else np.abs(values).max(-1, keepdims=True) / 127
    spread = np.abs(back.reshape(values.shape) - values)
    allowed = error * unit + (np.abs(values) * 2**-7 if fast == "bfloat16" else 0)
    assert (spread <= allowed + 1e-12).all()


@pytest.mark.parametrize(("fast", "slow"), [("int8", "bfloat16"), ("bfloat16", "float32"), ("float32", "int4")])
def test_types_that_do_not_go_together_are_refused(fast, slow):
    with pytest.raises(ConfigError, match="smaller type"):
        make_codec(fast, slow, 64, 4, 16)


# ---- saved prefixes


def test_a_saved_prefix_survives_a_restart(tmp_path):
    tensors = {"0.keys": RNG.normal(size=(2, 3, 4)).astype(np.float32), "0.scales": np.zeros((0, 3), np.float32),
               "1.keys": RNG.integers(0, 9, (2, 3), dtype=np.uint16)}  # fmt: skip
    SavedPrefixes(tmp_path, "model a").save([1, 2, 3, 4], tensors)
    again = SavedPrefixes(tmp_path, "model a")
    again.save([1, 2], tensors)
    assert again.find([1, 2, 3, 4, 5]) == 4
    assert again.find([1, 2, 9]) == 2
    assert again.find([2, 1]) == 0
    loaded = again.load([1, 2, 3, 4])
    assert all((loaded[name] == tensors[name]).all() and loaded[name].dtype == tensors[name].dtype for name in tensors)
    assert SavedPrefixes(tmp_path, "model b").find([1, 2, 3, 4]) == 0
    again.drop([1, 2, 3, 4])
    assert again.find([1, 2, 3, 4, 5]) == 2


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_a_damaged_prefix_is_an_error_that_says_so(tmp_path, harm):
    store = SavedPrefixes(tmp_path, "m")
    path = store.save([1, 2], {"k": np.arange(1000, dtype=np.float32)})
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"flip": content, "cut": content[:-100], "empty": b""}[harm])
    with pytest.raises(TransferError, match="computed again"):
        store.load([1, 2])


def test_an_interrupted_save_leaves_no_prefix_and_is_swept(tmp_path):
    store = SavedPrefixes(tmp_path, "m")
    left = tmp_path / "outrider-prefix-x-2-y.1.tmp"
    left.write_bytes(b"half")
    assert store.find([1, 2]) == 0
    os.utime(left, (0, 0))
    SavedPrefixes(tmp_path, "m")
    assert not left.exists()


def test_a_full_disk_while_saving_is_a_clear_error(tmp_path, monkeypatch):
    store = SavedPrefixes(tmp_path, "m")

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("outrider.memory.tiers.saved.save_file", full)
    with pytest.raises(CapacityError, match="No space left"):
        store.save([1], {"k": np.zeros(3, np.float32)})
    assert list(tmp_path.iterdir()) == []
