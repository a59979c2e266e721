"""Windows: memory of every rank that all ranks of a host may read and write."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from hocket.comm import open_window
from hocket.testing import deadline, no_leftovers, run_ranks


def exchange(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def write_and_read() -> tuple[list[int], list[int], int]:
    """Each rank writes its number into every part; what it finds in its own, then in the next rank's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    window = open_window(rank, 8 * size + rank, exchange)
    assert window is not None
    for peer in range(size):
        window.words(peer, size)[rank] = 10 * rank + peer
    window.fence()
    dist.barrier()
    mine, theirs = list(window.words(rank, size)), list(window.words((rank + 1) % size, size))
    seen = int(window.tensor((rank + 1) % size)[8 * rank])
    dist.barrier()
    window.close()
    return mine, theirs, seen


def outlive() -> set[int]:
    """Rank 1 dies; whom the others find dead, and that its memory is still there.

    The survivors wait for each other: one that had ended would be found dead, too, and rightly.
    """
    rank = dist.get_rank()
    window = open_window(rank, 64, exchange)
    assert window is not None
    window.words(rank, 1)[0] = rank + 5
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + deadline(10)
    while not (found := window.dead()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert window.words(1, 1)[0] == 6
    window.words(rank, 1)[0] = 0
    while window.words(2 - rank, 1)[0] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def open_none(hosts: list[str]) -> bool:
    os.environ["HOCKET_HOST"] = hosts[dist.get_rank()]
    return open_window(dist.get_rank(), 64, exchange) is None


def test_every_rank_reads_what_others_wrote() -> None:
    with no_leftovers():
        found = run_ranks(write_and_read, 3)
    for rank, (mine, theirs, seen) in enumerate(found):
        after = (rank + 1) % 3
        assert mine == [rank, 10 + rank, 20 + rank]
        assert theirs == [after, 10 + after, 20 + after]
        assert seen == 10 * rank + after


def test_a_dead_rank_is_found_and_its_memory_stays() -> None:
    with no_leftovers():
        found = run_ranks(outlive, 3, expect_death=[1])
    assert found[0] == found[2] == {1}


def test_ranks_that_do_not_share_a_host_get_none_all_of_them() -> None:
    assert run_ranks(open_none, 3, ["a", "a", "b"], backend="gloo") == [True] * 3
    assert run_ranks(open_none, 2, ["a", "a"], env={"HOCKET_SHARED_MEMORY": "0"}) == [True] * 2
