"""Linux namespaces by their system calls: make one, enter one, and see which one a process is in.

The calls change the calling thread; the programs that use them (the keeper, what runs in a host) have one thread.
"""

import ctypes
import errno
import os

from ._errors import FabricError

_CLONE_NEWUSER = 0x10000000  # <linux/sched.h>
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def enter(fd: int) -> None:
    """Move the calling thread into the namespace of a file descriptor; OSError if the kernel does not allow it."""
    _check(_libc.setns(fd, 0))


def new_network() -> int:
    """Make a network namespace and move the calling thread there; a descriptor that keeps it alive.

    Raises:
        PermissionError: the caller has not the right to; `new_user` may give it.
        FabricError: there are as many as the kernel allows.
    """
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        text = "the kernel makes no more network namespaces for this user; take fabrics down (hocket fabric down), or"
        raise FabricError(f"{text} raise the limit (sysctl user.max_net_namespaces)") from None
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_user() -> None:
    """Move this process into a user namespace of its own, in which its user has all rights.

    Raises:
        FabricError: the kernel does not allow that to this user.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        _check(_libc.unshare(_CLONE_NEWUSER))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    except OSError as error:
        raise FabricError(
            f"this user may not make namespaces ({error.strerror}); run as root, or let the kernel allow user "
            "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns)"
        ) from None


def network_of(pid: int) -> int | None:
    """Return the number of the network namespace that a process is in; None if it is gone or another's."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def in_network(numbers: set[int]) -> list[int]:
    """Return the processes that are in one of these network namespaces."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and network_of(int(name)) in numbers]


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            raise OSError(number, f"{os.strerror(number)}: has the process several threads?")
        raise OSError(number, os.strerror(number))
