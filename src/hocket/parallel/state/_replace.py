"""A directory takes the place of another: whatever is killed at whatever instant, one of them is there, whole."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # an old kernel; a file system that cannot, as NFS


def fresh_token() -> str:
    """Return what no other save has: ranks of a job that is dying cannot write into what the next one writes."""
    return uuid.uuid4().hex[:12]


def fresh(path: Path, token: str) -> Path:
    """Return where the next directory is written before it takes the place of `path`."""
    return path.with_name(f"{path.name}.new-{token}")


def beside(path: Path) -> list[Path]:
    """Return what saves that were killed have left, the next directories before those that they were to replace."""
    ours = re.compile(re.escape(path.name) + r"\.(new|old)-[0-9a-f]{12}")  # and nothing that a user may call his own
    if not path.parent.is_dir():
        return []
    return sorted(other for other in path.parent.iterdir() if ours.fullmatch(other.name))


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
    old = path.with_name(f"{path.name}.old-{fresh_token()}")
    if not path.exists():
        new.rename(path)
        sync(path.parent)
        return
    if exchange(new, path):
        old = new
    else:
        path.rename(old)
        new.rename(path)
    sync(path.parent)
    _remove(old, path)


def _remove(old: Path, path: Path) -> None:
    """Remove what was replaced; that it cannot be is no failure of who has saved."""
    try:
        shutil.rmtree(old)
    except PermissionError:  # another user's, in a directory where all of a group may rename
        kept = path.with_name(f"{path.name}.kept-{fresh_token()}")  # never again taken for what is meant by `path`
        old.rename(kept)
        print(f"hocket: what was at {path} before cannot be removed: it is kept as {kept.name}", file=sys.stderr)
    except OSError:  # NFS keeps a directory of whose files another process has one open: the next save removes it
        pass


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
