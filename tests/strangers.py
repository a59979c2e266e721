"""What somebody who does not belong to a job can try: another user of the machine, and whoever reaches its ports."""

import contextlib
import encodings.idna  # noqa: F401  (by which sockets read host names; another user may not import it any more)
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .processes import processes_with

NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_another_user(act: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `act` returns in a process of the user nobody: plain values."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, json.dumps(act(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def listening(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Return where these processes listen for TCP: hexadecimal address as /proc/net/tcp has it, and port."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                    inodes.add(match[1])
    found = []
    networks = {os.stat(f"/proc/{pid}/ns/net").st_ino: pid for pid in pids}  # ranks may be in namespaces of their own
    for pid in networks.values():
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:  # TCP_LISTEN, <net/tcp_states.h>
                    address, port = fields[1].split(":")
                    found.append((address, int(port, 16)))
    return sorted(set(found))


def opened(paths: list[str]) -> list[str]:
    """Return which of these can be opened, for reading or writing, or entered."""
    can = []
    for path in paths:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDONLY | os.O_DIRECTORY):
            try:
                os.close(os.open(path, flags))
            except OSError:
                continue
            can.append(path)
    return can


def reached(ports: list[int]) -> list[int]:
    """Return on which of these ports of this host somebody takes a connection."""
    taken = []
    for port in ports:
        for host in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((host, port), timeout=1.0).close()
            except OSError:
                continue
            taken.append(port)
    return taken


def garbage(ports: list[int], frames: int, seed: int) -> None:
    """Send so many frames of random bytes to these ports of this host, on a few hundred connections; some wait."""
    draw = random.Random(seed)
    taken: list[socket.socket] = []
    for number in range(frames):
        if number % 40 == 0:
            one = socket.socket()
            one.settimeout(0.2)
            try:
                one.connect(("127.0.0.1", draw.choice(ports)))
                taken.append(one)
            except OSError:  # nobody takes it
                one.close()
        if taken:
            with contextlib.suppress(OSError):
                draw.choice(taken[-20:]).sendall(draw.randbytes(draw.choice((1, 4, 8, 64, 96, 500))))
    for one in taken:
        one.close()


@contextlib.contextmanager
def dribbling(variable: str, value: Path, connections: int = 20) -> Iterator[set[int]]:
    """Keep connections to every port of some processes that are found by their environment, from their start on.

    Each gets a random byte fifty times a second, and is opened again when it is closed. Yields the
    ports that took some.
    """
    draw, end, taken = random.Random(5), threading.Event(), set[int]()

    def go() -> None:
        held: dict[tuple[int, int], socket.socket] = {}
        pids: list[int] = []
        look_s = 0.0
        while not end.wait(0.02):
            if time.monotonic() > look_s:  # looking through all processes takes longer than some ports are open
                pids, look_s = processes_with(variable, value), time.monotonic() + 0.5
            with contextlib.suppress(OSError):  # one has ended meanwhile
                for key in ((port, number) for _, port in listening(pids) for number in range(connections)):
                    if key not in held:
                        held[key] = socket.socket()
                        held[key].setblocking(False)
                        held[key].connect_ex(("127.0.0.1", key[0]))
            for key, one in list(held.items()):
                try:
                    one.send(draw.randbytes(1))
                    taken.add(key[0])
                except BlockingIOError:
                    continue
                except OSError:
                    held.pop(key).close()
        for one in held.values():
            one.close()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield taken
    finally:
        end.set()
        thread.join()
