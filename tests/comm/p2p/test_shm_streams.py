"""Messages in shared memory: what is under way, and what goes through a ring whose base moves."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hocket.comm import PeerDiedError, open_streams
from hocket.comm.p2p._shm_streams import stream_nbytes
from hocket.testing import deadline, run_ranks


def while_the_sender_does_something_else(numel: int, arrived: Path) -> bool:
    """Return whether the message had arrived before the sender did anything more for it."""
    values = torch.arange(numel, dtype=torch.float32)
    if dist.get_rank() == 0:
        work = dist.isend(values, 1)
        end_s = time.monotonic() + deadline(10)
        while not arrived.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        early = arrived.exists()
        work.wait()
        return early
    got = torch.zeros(numel)
    dist.recv(got, 0)
    arrived.touch()
    return torch.equal(got, values)


def test_messages_of_megabytes_arrive_while_their_sender_computes(tmp_path: Path) -> None:
    assert run_ranks(while_the_sender_does_something_else, 2, 1 << 21, tmp_path / "arrived") == [True, True]


def both_ways(seeds: int) -> list[bool]:
    pattern = torch.arange(max(1 << 20, stream_nbytes(2) + 12345)).to(torch.uint8)
    return [messages(seed, pattern) for seed in range(seeds)]


def messages(seed: int, pattern: torch.Tensor) -> bool:
    """Messages of 0 bytes to more than a ring, some waited for late, in both directions at once."""
    draw, rank, right = random.Random(seed), dist.get_rank(), True

    def content(number: int, sender: int, nbytes: int) -> torch.Tensor:
        return pattern[:nbytes] + (7 * number + sender) % 256

    sizes = [draw.choice((0, 1, 13, 1 << 12, (1 << 18) - 4, 1 << 18, 700_001, 1 << 20)) for _ in range(40)]
    sizes += [stream_nbytes(2) + 12345]
    waiting = []
    for number, nbytes in enumerate(sizes):
        sent, got = content(number, rank, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        waiting.append((dist.isend(sent, 1 - rank), dist.irecv(got, 1 - rank), number, got))
        while waiting and (number + 1 == len(sizes) or draw.random() < 0.5):
            out, back, earlier, held = waiting.pop(0)
            back.wait()
            out.wait()
            right = right and torch.equal(held, content(earlier, 1 - rank, len(held)))
    return right


@pytest.mark.long
def test_random_messages_in_both_directions_arrive_as_they_were_sent() -> None:
    assert run_ranks(both_ways, 2, 6) == [[True] * 6] * 2


def empty_first() -> float:
    streams = open_streams(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), dist.get_rank(), 2,
                           timedelta(seconds=30))  # fmt: skip
    values = torch.full((4,), 7.0)
    if dist.get_rank() == 0:
        waiting = [streams.send(torch.empty(0), 1), streams.send(values, 1)]
    else:
        waiting = [streams.receive(torch.empty(0), 0), streams.receive(values.zero_(), 0)]
    for one in waiting:
        one.wait(10.0)
    dist.barrier()
    return float(values.sum())


def test_a_message_of_no_bytes_holds_up_nothing() -> None:
    assert run_ranks(empty_first, 2) == [28.0, 28.0]


def leaves(pause_s: float) -> tuple[str, float]:
    """Rank 1 leaves its group and lives on; rank 0 waits for it."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    begin_s, said = time.monotonic(), ""
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        while not store.check(["said"]) and time.monotonic() < begin_s + pause_s:
            time.sleep(0.05)
    else:
        try:
            dist.recv(torch.zeros(4), 1)
        except PeerDiedError as error:
            said = str(error)
            store.set("said", said)
    return said, time.monotonic() - begin_s


def test_who_leaves_its_group_is_waited_for_no_longer() -> None:
    (said, seconds), _ = run_ranks(leaves, 2, deadline(4.0), group_timeout_s=60)
    assert "rank 1 has left (it ended or destroyed the group) while rank 0 waited for it in recv from rank 1" in said
    assert seconds < deadline(3.0)


def rung_all_the_time() -> tuple[str, float]:
    """Rank 1 dies while rank 2 keeps sending to rank 0, which waits for rank 1."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    begin_s, said = time.monotonic(), ""
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        while not store.check(["said"]) and time.monotonic() < begin_s + deadline(6.0):
            dist.isend(torch.ones(8), 0)
            time.sleep(0.02)
        return said, 0.0
    try:
        dist.recv(torch.zeros(4), 1)
    except PeerDiedError as error:
        said = str(error)
        store.set("said", said)
    return said, time.monotonic() - begin_s


def test_a_peer_that_dies_is_noticed_while_another_rings() -> None:
    found = run_ranks(rung_all_the_time, 3, expect_death=[1], group_timeout_s=60)
    said, seconds = found[0]
    assert "rank 1 (process" in said
    assert "died while rank 0 waited for it in recv from rank 1" in said
    assert seconds < deadline(4.0)


def test_rings_of_many_ranks_take_no_more_than_those_of_few() -> None:
    assert [stream_nbytes(n) for n in (1, 2, 4, 5, 8, 64, 128, 512)] == [
        1 << 24, 1 << 24, 1 << 24, 1 << 23, 1 << 23, 1 << 20, 1 << 19, 1 << 19,
    ]  # fmt: skip
