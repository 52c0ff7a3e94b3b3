"""A scratch file that no crash leaves behind: owned through a lock, removed at exit, swept by the next start."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
import weakref
from pathlib import Path

from outrider.errors import CapacityError, ConfigError

try:
    import fcntl
except ImportError:  # Windows has neither flock nor pread
    fcntl = None  # type: ignore[assignment]

PATTERN = "outrider-kv-*.bin"


class ScratchFile:
    """A new file in `folder` that belongs to this process for as long as it is open.

    The owner holds a lock that the kernel releases when the process dies, however it dies; a file whose lock can be
    taken is therefore nobody's, whatever number a process has today.
    """

    def __init__(self, folder: str | Path) -> None:
        if fcntl is None:
            raise ConfigError("kv_path needs a system with file locks (Linux or macOS); leave it out", "kv_path")
        self.folder = Path(folder).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            self.path, self.fd = _create(self.folder)
        except OSError as error:
            raise ConfigError(
                f"kv_path = {str(folder)!r} cannot be used ({error.strerror}); name a folder that can be written to",
                "kv_path",
            ) from None
        self._finalizer = weakref.finalize(self, _remove, self.path, self.fd, os.getpid())

    def grow(self, size: int) -> None:
        """Make the file `size` bytes long, its space reserved where the system can. CapacityError when it is full."""
        try:
            _allocate(self.fd, size)
        except OSError as error:
            raise CapacityError(
                f"{self.folder} has no room for {size:,} bytes of KV ({error.strerror}); free space, name another "
                "kv_path or lower the number of requests or their length"
            ) from None

    def close(self) -> None:
        """Remove the file. Closing twice is fine."""
        self._finalizer()


def sweep(folder: Path) -> list[Path]:
    """Remove scratch files whose owners are gone; returns them."""
    removed = []
    for path in sorted(folder.glob(PATTERN)):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def _create(folder: Path) -> tuple[Path, int]:
    """A new locked file. A sweeper may take it between its creation and its lock; then another one is made."""
    while True:
        path = folder / f"outrider-kv-{os.getpid()}-{uuid.uuid4().hex[:12]}.bin"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return path, fd
        os.close(fd)


def _allocate(fd: int, size: int) -> None:
    """Reserve space, or only set the length on file systems that cannot reserve."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def _remove(path: Path, fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take the file away from its parent
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(fd)
