"""A directory takes the place of another: whatever is killed at whatever instant, one of them is there, whole."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # an old kernel; a file system that cannot, as NFS


def beside(path: Path) -> tuple[Path, Path]:
    """Return where the next directory is written before it takes the place of `path`, and where the last one may be."""
    return path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.old")


def standing(path: Path, is_whole: Callable[[Path], bool]) -> Path:
    """Return where what is meant by `path` lies: there, or beside it, if `replace` was killed between two renames.

    Args:
        path: The directory.
        is_whole: Says of a directory beside it whether it was written to its end.
    """
    if os.path.lexists(path):
        return path
    return next((other for other in beside(path) if is_whole(other)), path)


def replace(new: Path, path: Path) -> None:
    """Put the directory `new` in the place of `path`, which is removed, if it exists; on the disk when this returns."""
    old = beside(path)[1]
    if not path.exists():
        new.rename(path)
        sync(path.parent)
        return
    if exchange(new, path):
        sync(path.parent)
        shutil.rmtree(new)
        return
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    new.rename(path)
    sync(path.parent)
    shutil.rmtree(old)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one instant, and return whether the system can; Linux's renameat2."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
