"""Anonymous shared memory that a peer on the same host can map, and that vanishes with its last user.

A segment is a memfd: it has no name in /dev/shm, so a rank killed at any moment leaves nothing behind, and a small
/dev/shm (as in containers) does not limit it. A peer opens it as `/proc/PID/fd/FD`.
"""

import contextlib
import errno
import mmap
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from hocket import _sweep

from ..transport import CommError

PAGE = 4096
_MARK = slice(PAGE - 8, PAGE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer finds a segment."""

    pid: int  # process that owns it
    fd: int  # file descriptor in that process
    nbytes: int  # size in bytes


class SharedSegment:
    """A stretch of shared memory mapped into this process, seen as bytes (`view`) and as a uint8 tensor (`tensor`)."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.base = self.tensor.data_ptr()

    @classmethod
    def create(cls, name: str, nbytes: int) -> "SharedSegment":
        """Make a new segment of `nbytes` zeros (memory is used only where it is touched)."""
        nbytes = -(-nbytes // PAGE) * PAGE
        fd = os.memfd_create(f"hocket-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, nbytes)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno == errno.EFBIG:  # a memfd counts as a file
                need = f"{nbytes} bytes of shared memory are more than the limit of a file's size allows"
                raise OSError(error.errno, f"{need}: say `ulimit -f unlimited` before you start") from None
            raise

    @classmethod
    def attach(cls, address: Address, mark: int | None = None) -> "SharedSegment":
        """Map a segment of another process on this host, if it has this mark.

        Raises:
            OSError: the process is not visible from here, or does not let us look.
            ValueError: another process has that number by now.
        """
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(fd, address.nbytes)
        finally:
            os.close(fd)
        if mark is not None and segment.view[_MARK] != mark.to_bytes(8, "little"):
            raise ValueError("the process number belongs to another process")
        return segment

    def mark(self, number: int) -> None:
        """Write the number by which a peer can tell that it mapped the right segment, at the end of the first page."""
        self.view[_MARK] = number.to_bytes(8, "little")

    def address(self) -> Address:
        """Return what a peer needs to attach this segment while this process keeps `fd` open."""
        return Address(os.getpid(), self.fd, self.nbytes)

    def close(self) -> None:
        """Give up the descriptor; the memory goes when the last mapping of any process does."""
        with contextlib.suppress(OSError):
            os.close(self.fd)


def host_identity() -> str:
    """Return a text that is equal for two processes only if they run under the same kernel and process namespace.

    HOCKET_HOST, if set, is part of it: emulated hosts of one machine are told apart by it.

    Raises:
        CommError: There is no /proc, as in a bare chroot.
    """
    boot = socket.gethostname()  # where a container hides /proc/sys
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        raise CommError(f"ranks cannot tell who shares a host: {error.strerror}; {_sweep.NO_PROC}") from None
    return f"{boot}:{space}:{os.environ.get('HOCKET_HOST', '')}"


def nonce() -> int:
    """Return a random 63-bit number by which a peer can tell that it mapped the right segment."""
    return secrets.randbits(63)
