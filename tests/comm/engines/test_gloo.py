"""What becomes of the sockets at which Gloo listens."""

import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from hocket.comm.engines import Gloo
from hocket.comm.engines._sockets import OwnSocket, own_address, take_no_more
from hocket.testing import deadline


def test_a_listening_socket_is_closed_its_connections_go_on_and_its_number_stays_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as waiting:
        place, number = listener.getsockname(), listener.fileno()
        waiting.register(number, select.EPOLLIN)
        with socket.create_connection(place) as mine:
            theirs, _ = listener.accept()
            with theirs:
                take_no_more(OwnSocket(number, os.fstat(number).st_ino))
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(place)
                mine.sendall(b"on")
                assert theirs.recv(2) == b"on"
                assert waiting.poll(0.05) == []  # whose thread would turn round and round
                waiting.unregister(number)  # as Gloo does when it ends
                os.fstat(number)


class _Routed:
    """A socket of a host, all of whose routes lead out by one interface; nobody else knows of its name."""

    def __init__(self, *_: object) -> None:
        self.there = ""

    def bind(self, there: tuple[str, int]) -> None:
        if there[0] == "10.7.0.1":
            raise OSError("Cannot assign requested address")

    def connect(self, there: tuple[str, int]) -> None:
        self.there = there[0]

    def getsockname(self) -> tuple[str, int]:
        return (self.there if self.there.startswith("127.") else "10.9.0.1", 5)

    def __enter__(self) -> "_Routed":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("named", "master", "own"),
    [
        ("10.8.0.1", "10.9.0.2", None),  # as Gloo finds it itself
        ("10.8.0.1 10.9.0.1", "10.9.0.2", "10.9.0.1"),  # as nss-myhostname has it: all addresses, a bridge's first
        ("10.9.0.1 10.8.0.1", "10.9.0.2", None),
        ("10.8.0.1 10.8.0.3", "10.9.0.2", None),
        ("127.0.1.1", "10.9.0.2", "10.9.0.1"),  # as in Debian's /etc/hosts
        ("127.0.1.1", "here", "10.9.0.1"),
        ("10.7.0.1", "10.9.0.2", "10.9.0.1"),  # as it was once, or elsewhere
        ("127.0.1.1", "127.0.0.1", None),  # all ranks are on this host
    ],
)
def test_a_host_whose_name_is_of_loopback_or_of_several_is_reached_at_an_address_that_others_have(
    named: str, master: str, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        addresses = named.split() if name == "here" else [name]
        return [(socket.AF_INET, None, None, "", (address, 9)) for address in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "socket", _Routed)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_address() == own


def test_a_host_to_whose_address_nothing_leads_is_told_of_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("[enforce fail at socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable")

    monkeypatch.setattr("hocket.comm.engines._gloo.own_address", lambda: None)
    monkeypatch.setattr("hocket.comm.torch_adapter.process_group_gloo", refuse)
    with pytest.raises(RuntimeError, match="Network is unreachable. Hosts connect by .*GLOO_SOCKET_IFNAME"):
        Gloo(dist.HashStore(), 0, 2, timedelta(seconds=1)).connect()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("networks", "master", "own"),
    [(1, "node0", "10.9.0.1"), (2, "node0", "None"), (1, "127.0.0.1", "None"), (0, "node0", "None")],
)
def test_a_host_of_a_closed_network_is_reached_at_its_only_address(networks: int, master: str, own: str) -> None:
    """Nothing leads to a default route there, and the name of rank 0's host to loopback: others were told 127.0.1.1."""
    inside = ["unshare", "--map-root-user", "--net", "--uts", "--mount", "sh", "-ec"]
    lines = ["hostname node0", "ip link set lo up", "mount -t tmpfs none /mnt"]
    lines += ["printf '127.0.0.1 localhost\\n127.0.1.1 node0\\n' > /mnt/hosts", "mount --bind /mnt/hosts /etc/hosts"]
    for number in range(networks):
        lines += [f"ip link add net{number} type bridge", f"ip link set net{number} up"]
        lines += [f"ip address add 10.9.{number}.1/24 dev net{number}"]
    tools = all(map(shutil.which, ("unshare", "ip", "hostname")))
    if not tools or subprocess.run([*inside, "\n".join(lines)], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare, ip and hostname, and a kernel that makes user namespaces and bridges")
    source = "from hocket.comm.engines._sockets import own_address; print(own_address())"
    script = "\n".join([*lines, f"MASTER_ADDR={master} exec {shlex.join([sys.executable, '-c', source])}"])
    ran = subprocess.run([*inside, script], capture_output=True, text=True, check=True, timeout=deadline(60))
    assert ran.stdout.strip() == own


def _until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + deadline(10)
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _alone(gloo: Gloo, errors: list[Exception]) -> threading.Thread:
    def connect() -> None:
        try:
            gloo.connect()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


def test_a_group_that_connects_closes_no_socket_of_another_that_waits_for_its_ranks_nor_of_the_program() -> None:
    groups = [[Gloo(store, rank, 2, timedelta(seconds=deadline(20))) for rank in range(2)]
              for store in (dist.HashStore(), dist.HashStore())]  # fmt: skip
    for gloo in (*groups[0], *groups[1]):
        gloo.loopback = True
    errors: list[Exception] = []
    first, other = groups
    threads = [_alone(first[0], errors)]
    _until(lambda: first[0]._store.check(["0/0"]))  # it listens
    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as waiting:  # a thread's of the program
        waiting.register(server.fileno(), select.EPOLLIN)
        threads.append(_alone(other[0], errors))
        _until(lambda: other[0]._store.check(["0/0"]))
        threads.append(_alone(first[1], errors))  # comes first; that of `other` is still to come
        for thread in (threads[0], threads[2]):
            thread.join()
        threads.append(_alone(other[1], errors))
        for thread in threads:
            thread.join()
        assert server.getsockname()  # still open: Gloo puts another socket in the place of one that it closes
        socket.create_connection(server.getsockname()).close()
    assert not errors
    for gloo in (*first, *other):
        gloo.end()
