"""Become a command inside namespaces. Run by its path, so that nothing of hocket is imported.

    python -I -S _enter.py USER_NAMESPACE|- NETWORK_NAMESPACE PARENT|0 COMMAND [ARGUMENT...]

With a PARENT, the command gets SIGKILL when that process, which must be the one that started it, dies.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Enter, and become the command."""
    user, network, parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, path in (("user", user), ("net", network)):
        if path == "-":
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SystemExit(f"the fabric is not there any more: {error}") from None
        if os.fstat(fd).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
            continue  # we are there; the kernel lets nobody enter his own user namespace
        if libc.setns(fd, 0):
            raise SystemExit(f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
    if parent != "0":
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            raise SystemExit(f"process {parent} has gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from None


if __name__ == "__main__":
    main()
