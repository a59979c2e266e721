"""Fabrics for tests, which are skipped where the kernel makes no namespaces; and what sees that nothing is left."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
from hocket.testing import deadline

from ..processes import processes_with

Up = Callable[..., Fabric]

# Takes one connection; says how many bytes came, and how fast from the first on.
TAKE = """
import json, socket, sys, time
server = socket.create_server(("", 7))
print("ready", flush=True)
peer, _ = server.accept()
begin_s, nbytes = None, 0
while piece := peer.recv(1 << 18):
    begin_s = begin_s or time.monotonic()
    nbytes += len(piece)
print(json.dumps({"nbytes": nbytes, "seconds": time.monotonic() - begin_s, "peer": peer.getpeername()[0]}))
"""
SEND = """
import socket, sys
address, nbytes, ports = sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[3:]]
for port in ports or [0]:
    with socket.create_connection((address, 7), source_address=("", port)) as peer:
        peer.sendall(bytes(nbytes))
"""


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    pytest.importorskip("pyroute2", reason="fabrics need the extra `fabric`")
    try:
        Fabric(load("star:hosts=1")).close()
    except FabricError as error:
        pytest.skip(f"no fabrics here: {error}")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of this test's own; no fabric's file may be left in it, and no process of one."""
    directory = Path(tempfile.mkdtemp(prefix="hf-"))  # short: a socket's path has at most 107 letters
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []
    directory.rmdir()
    assert processes_with("TMPDIR", directory) == []


@pytest.fixture
def up() -> Iterator[Up]:
    """Make fabrics that are taken down when the test ends."""
    made: list[Fabric] = []

    def make(cluster: str, **settings: Any) -> Fabric:
        made.append(Fabric(load(cluster), **settings))
        return made[-1]

    yield make
    for fabric in made:
        fabric.close()


def output(fabric: Fabric, host: str, code: str, *arguments: str) -> str:
    """What a Python program prints in a host."""
    process = fabric.run_in_host(
        host, [sys.executable, "-I", "-S", "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    printed, _ = process.communicate(timeout=deadline(30))
    assert process.returncode == 0
    return str(printed)
