"""The keeper of one fabric: a process that builds it, holds its namespaces, answers questions, and ends it.

    python -m hocket.fabric._keeper  <  order as JSON

It says on stdout in one line of JSON whether the fabric is up. It ends when it is told to by its socket or a signal, or
when its owner has gone. It has one thread: namespaces belong to threads.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from hocket._sweep import start_ticks

from ._build import Networks
from ._errors import FabricError
from ._namespace import enter, new_network, new_user
from ._sweep import end_in_network, remove_files, remove_files_of, stand_by
from ._wiring import Wiring

_MOST_NBYTES = 1 << 16
_END_GRACE_S = 2.0  # for who runs in a host, when the fabric is taken down


class _End(Exception):
    pass


def main() -> None:
    """Build what stdin orders, keep it, end it."""
    order = json.load(sys.stdin)
    wiring = Wiring.from_json(order["wiring"])
    file, sock = order["file"], order["socket"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, and with it we go
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        user = _rights()
        networks = Networks(wiring, order["seed"])
        numbers = {os.fstat(fd).st_ino for fd in networks.fds}
        _write_state(order, networks.fds, user)
        warden, pipe = _warden(numbers, (file, sock))
        try:
            server = _listen(sock)
            print(json.dumps({"up": True}), flush=True)
            _detach()
            _serve(server, networks, order["owner"])
        except _End:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # An owner that runs inside and takes its fabric down is not to be ended by it.
            end_in_network(numbers, _END_GRACE_S, lambda pid: pid != order["owner"])
            remove_files_of(os.getpid(), (file, sock))
            os.write(pipe, b".")
            os.waitpid(warden, 0)
    except (FabricError, OSError) as error:
        with contextlib.suppress(OSError):
            print(json.dumps({"up": False, "why": str(error)}), flush=True)
        raise SystemExit(1) from None


def _terminate(number: int, _: object) -> None:
    raise _End


def _rights() -> bool:
    """Return whether it took a user namespace to be allowed to make network namespaces."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.close(new_network())
    except PermissionError:
        new_user()
        os.close(new_network())  # one to come back to: the one that we come from is not ours to enter
        return True
    else:
        enter(home)
        return False
    finally:
        os.close(home)


def _warden(numbers: set[int], paths: tuple[str, ...]) -> tuple[int, int]:
    """Start the warden; its process, and the end of a pipe whose closing it sees."""
    read, write = os.pipe()
    keeper = os.getpid()
    warden = os.fork()
    if warden == 0:
        os.close(write)
        os.setsid()
        _detach()
        stand_by(read, keeper, numbers, paths)
    os.close(read)
    return warden, write


def _detach() -> None:
    """Go on without output: nobody waits for what we print any more."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _listen(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    remove_files((path,))
    before = os.umask(0o177)
    try:
        server.bind(path)
    finally:
        os.umask(before)
    server.listen(8)
    return server


def _write_state(order: dict[str, Any], fds: list[int], user: bool) -> None:
    me = os.getpid()
    state = {
        "name": order["name"],
        "keeper": me,
        "keeper_start": start_ticks(me),
        "owner": order["owner"],
        "user_namespace": f"/proc/{me}/ns/user" if user else None,
        "namespaces": [f"/proc/{me}/fd/{fd}" for fd in fds],
        "numbers": [os.fstat(fd).st_ino for fd in fds],
        "wiring": order["wiring"],
    }
    part = f"{order['file']}.{me}"
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(state, file)
        os.link(part, order["file"])  # which, unlike a rename, takes the place of no other's
    except FileExistsError:
        raise FabricError(f"a fabric {order['name']!r} has just come up; choose another name") from None
    finally:
        remove_files((part,))


def _serve(server: socket.socket, networks: Networks, owner: int | None) -> None:
    """Answer until the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ, "question")
        if owner is not None:
            try:
                selector.register(os.pidfd_open(owner), selectors.EVENT_READ, "owner has gone")
            except ProcessLookupError:
                raise _End from None
        while True:
            for key, _ in selector.select():
                if key.data != "question":
                    raise _End
                asker, _ = server.accept()
                with asker, contextlib.suppress(OSError):
                    asker.settimeout(2.0)
                    _answer(asker, networks)


def _answer(asker: socket.socket, networks: Networks) -> None:
    with asker.makefile("rw") as lines:
        try:
            question = json.loads(lines.readline(_MOST_NBYTES))
            what = question["ask"]
            answer: Any = None
            if what == "counters":
                answer = networks.counters()
            elif what == "cut":
                networks.cut(question["link"], question["broken"])
            elif what == "end":
                raise _End
            else:
                raise FabricError(f"the keeper does not know {what!r}")
            reply = {"answer": answer}
        except (ValueError, KeyError, TypeError, OSError, FabricError) as error:
            reply = {"error": str(error)}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()
