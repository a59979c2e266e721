"""One program at a time saves to a path: a lock of the file system, which ends with who holds it, also by kill -9."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..mesh import World
from ._manifest import CheckpointError, alike

_LEASE_S = 100.0  # NFS takes back the locks of a host that has died after 90 s; a run that goes on elsewhere waits
_held: dict[Path, int] = {}  # by the lock's path, its descriptor
_inherited: set[Path] = set()  # locks of the process that has forked this one, which saves under them
_used: set[Path] = set()  # locks under which this program has saved
_savers: dict[Path, WeakSet[Any]] = {}  # by the lock's path, who of this program goes on from what is saved there


@contextmanager
def locked(path: Path, world: World) -> Iterator[None]:
    """Open a block in which no other program saves to `path`; a collective operation.

    Who comes a second time saves there again and again, and holds it from then on: of two such programs each would
    replace what the other has saved.

    Raises:
        CheckpointError: Another one does.
    """
    lock = _lock_of(path)
    keeps = lock in _held or lock in _inherited or lock in _used
    lock_until_exit(path, world)
    try:
        yield
        _used.add(lock)
    finally:
        if not keeps:
            _unlock(lock)


def lock_until_exit(path: Path, world: World) -> None:
    """As `locked`, until this program ends."""
    with alike(world):
        if world.rank == 0 and (lock := _lock_of(path)) not in {*_held, *_inherited}:
            deadline_s = time.monotonic() + _LEASE_S
            while (owner := _taken(lock)) is not None:
                if owner.endswith(_here()) or time.monotonic() > deadline_s:
                    raise CheckpointError(
                        f"{owner} still runs and saves to the same path: give each run its own, or end that one. If it "
                        f"does not run, remove {lock}"
                    )
                time.sleep(1.0)


def goes_on(path: Path, saver: Any) -> bool:
    """Return whether what is at `path` is this one's, saved or loaded by it, so that its next save loses nothing.

    Raises:
        CheckpointError: It is another one's of this program, which is still in use.
    """
    savers = _savers.get(_lock_of(path), WeakSet())
    if saver in savers:
        return True
    if len(savers):
        gc.collect()  # one that was replaced may be in a cycle
        if len(savers):
            raise CheckpointError(
                "another Trainer of this program has saved there, and its checkpoint would be lost: give each its own "
                "path, or load that one first"
            )
    return False


def saved(path: Path, saver: Any) -> None:
    """Note that this one has saved there, and replaced what was others'."""
    _savers[_lock_of(path)] = WeakSet([saver])


def loaded(path: Path, saver: Any) -> None:
    """Note that this one goes on from there, too."""
    _savers.setdefault(_lock_of(path), WeakSet()).add(saver)


def _taken(lock: Path) -> str | None:
    """Take a lock if it is free, and return None; else who has it. File systems without locks have none taken."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:  # another user's; or nothing can be written there, which who saves is told
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()}{_here()}".encode())
                    _held[lock] = descriptor
                    return None
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            return owner or "another program"
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # who had it has removed it


def _here() -> str:
    return f" on {socket.gethostname()}"


def _lock_of(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f"{path.name}.lock")


@atexit.register
def _unlock(*locks: Path) -> None:
    for lock in locks or list(_held):
        if (descriptor := _held.pop(lock, None)) is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _forked() -> None:
    """Leave a parent's locks to it: they stay when this child of it ends."""
    _inherited.update(_held)
    _held.clear()


os.register_at_fork(after_in_child=_forked)
