"""A network that loses what a rank sends is told by that rank, where the other hosts' records are elsewhere."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
from hocket.profile import find_hang, standing
from hocket.profile._live import live_ranks
from hocket.profile._record import RankRecord
from hocket.testing import deadline

SERVER = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listens", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
"""
RANK = """
import socket, sys
from hocket.profile import _watch
peer = socket.create_connection((sys.argv[1], 7000))
_watch.watch(0, 2, sys.argv[2])
_watch._watch.record.message_waiting(1, 8, False)
for line in sys.stdin:
    peer.sendall(bytes(8))
    print("sent", flush=True)
"""


@pytest.mark.long
def test_a_rank_tells_that_the_network_loses_what_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyroute2", reason="fabrics need the extra `fabric`")
    monkeypatch.setenv("HOCKET_HANG_S", "0.5")
    try:
        fabric = Fabric(load("star:hosts=2"))
    except FabricError as error:
        pytest.skip(f"no fabrics here: {error}")
    settings: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with fabric:
        address = fabric.address("host1")
        server = fabric.run_in_host("host1", [sys.executable, "-c", SERVER], **settings)
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        rank = fabric.run_in_host("host0", [sys.executable, "-c", RANK, address, str(tmp_path)], **settings)
        assert rank.stdout is not None
        try:
            for broken in (False, True):
                if broken:
                    fabric.cut("switch0->host1")
                print(file=rank.stdin, flush=True)
                assert rank.stdout.readline() == "sent\n"
                if not broken:
                    time.sleep(2.0)  # it has waited four times as long as it needs to tell
                    assert not (tmp_path / "hangs.jsonl").exists()
            for _ in range(int(deadline(60) * 10)):
                if (tmp_path / "hangs.jsonl").exists():
                    break
                time.sleep(0.1)
        finally:
            for process in (rank, server):
                process.kill()
                _, said = process.communicate(timeout=deadline(30))
                if process is rank:
                    told = said
    (found,) = [json.loads(line) for line in (tmp_path / "hangs.jsonl").read_text().splitlines()]
    assert (found["kind"], found["ranks"], found["waiting"], found["speaker"]) == ("undelivered", [], [0], 0)
    assert f"in a message to rank 1, and what it sends to {address} does not arrive: it was sent again" in told


@pytest.mark.parametrize("peer", [1, -1])
def test_a_wait_for_a_message_of_a_rank_whose_record_is_elsewhere_is_no_stalled_way(tmp_path: Path, peer: int) -> None:
    record = RankRecord(tmp_path, 0, 2)
    record.message_waiting(peer, 8, True)
    assert find_hang(live_ranks(tmp_path, dump=False), 0.0) is None
    lone = [replace(one, waits_s=20.0) for one in live_ranks(tmp_path, dump=False)]
    assert (standing(lone).kind, standing(lone).waiting) == ("unseen", (0,))
    assert "has waited 20 s in a message from" in standing(lone).sentence
    assert standing(lone).sentence.endswith("who is late is not known, since rank 1 has no record here")
    RankRecord(tmp_path, 1, 2).message_waiting(0, 8, True)
    assert find_hang(live_ranks(tmp_path, dump=False), 0.0) is not None, "all records are here"
