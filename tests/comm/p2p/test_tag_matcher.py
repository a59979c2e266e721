"""send, recv and recv-any between ranks of one host: order, tags, early messages, threads, deaths."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, PeerDiedError
from hocket.testing import deadline, run_ranks

LARGE = 3_000_000  # 12 MB: more than a lane holds


def _large_both_ways_at_once():
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    out, into = torch.full((LARGE,), float(me)), torch.zeros(LARGE)
    works = [dist.isend(out, peer), dist.irecv(into, peer)]
    for work in works:
        assert work.wait()
    return bool((into == peer).all()) and works[1].is_completed()


def test_two_ranks_send_each_other_more_than_a_stream_holds():
    assert run_ranks(_large_both_ways_at_once, 2) == [True, True]


def _tags_out_of_order():
    if dist.get_rank() == 0:
        for tag in (3, 1, 2):
            dist.send(torch.full((200_000,), float(tag)), 1, tag=tag)
        return None
    found = []
    time.sleep(0.1)
    for tag in (2, 3, 1):
        tensor = torch.zeros(200_000)
        dist.recv(tensor, 0, tag=tag)
        found.append(tensor.unique().tolist())
    return found


def test_messages_are_matched_by_tag_and_kept_until_somebody_waits():
    assert run_ranks(_tags_out_of_order, 2)[1] == [[2.0], [3.0], [1.0]]


def _from_any():
    me, n = dist.get_rank(), dist.get_world_size()
    if me:
        dist.send(torch.tensor([float(me)]), 0, tag=5)
        return None
    heard = set()
    for _ in range(n - 1):
        tensor = torch.zeros(1)
        source = dist.recv(tensor, None, tag=5)
        assert tensor.item() == source
        heard.add(source)
    return heard


def test_receive_from_whichever_comes():
    assert run_ranks(_from_any, 4)[0] == {1, 2, 3}


def _goes_on_beside():
    """Both post a large receive, then meet in a collective without having waited."""
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    into = torch.zeros(LARGE)
    work = dist.irecv(into, peer)
    dist.barrier()
    if me == 0:
        dist.send(torch.ones(LARGE), peer)  # done only if the other's thread takes it
        dist.barrier()
        sending = None
    else:
        dist.barrier()
        sending = dist.isend(torch.full((LARGE,), 2.0), peer)
    work.wait()
    if sending is not None:
        sending.wait()
    return into.mean().item()


def test_what_was_posted_goes_on_while_a_rank_does_something_else():
    assert run_ranks(_goes_on_beside, 2) == [2.0, 1.0]


def _strided_empty_and_odd():
    me, peer = dist.get_rank(), 1 - dist.get_rank()
    for tensor in (
        torch.arange(10)[::2] + 0,
        torch.empty(0),
        torch.tensor(7, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.arange(6.0).to(torch.complex64).reshape(2, 3).t(),
        torch.ones(5, dtype=torch.bfloat16),
    ):
        into = torch.zeros_like(tensor)
        if me == 0:
            dist.send(tensor, peer)
            dist.recv(into, peer)
        else:
            dist.recv(into, peer)
            dist.send(tensor, peer)
        assert torch.equal(into, tensor)
    wide = torch.zeros(8)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, wide[::2], peer)])[
        1
    ].wait()
    return wide.tolist()


def test_every_layout_and_type_passes():
    assert run_ranks(_strided_empty_and_odd, 2) == [[1.0, 0.0] * 4] * 2


def _threads():
    """Four threads of each rank talk at once, each with a tag of its own."""
    peer, wrong = 1 - dist.get_rank(), []

    def talk(tag):
        for turn in range(30):
            into = torch.zeros(20_000)
            works = [dist.isend(torch.full((20_000,), 100.0 * tag + turn), peer, tag=tag)]
            works.append(dist.irecv(into, peer, tag=tag))
            for work in works:
                work.wait()
            if not (into == 100 * tag + turn).all():
                wrong.append((tag, turn))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
    return wrong, [thread.is_alive() for thread in threads]


def test_several_threads_may_send_and_receive():
    assert run_ranks(_threads, 2) == [([], [False] * 4)] * 2


def _wrong_length():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(2), 1)
        return None
    try:
        dist.recv(torch.zeros(5), 0)
    except CollectiveMismatchError as error:
        text = str(error)
    after = torch.zeros(2)
    dist.recv(after, 0)
    return text, after.tolist()


def test_a_message_of_another_length_is_an_error_and_the_next_is_right():
    text, after = run_ranks(_wrong_length, 2)[1]
    assert "recv from rank 0 of 20 bytes of float32 with tag 0: rank 0 sent 16 bytes of float32" in text
    assert after == [1.0, 1.0]


def _dies():
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
        os.kill(os.getpid(), 9)
    time.sleep(0.3)
    before = torch.zeros(3)
    dist.recv(before, 1)  # what it had sent is still there
    begin = time.monotonic()
    with pytest.raises(PeerDiedError, match=r"rank 1 \(process \d+\) died while rank 0 waited for it in recv"):
        dist.recv(torch.zeros(3), 1)
    with pytest.raises(PeerDiedError, match="rank 1"):
        dist.recv(torch.zeros(3), None)
    in_time = time.monotonic() - begin < deadline(5)
    time.sleep(0.4)  # it looks three times a second
    with pytest.raises(PeerDiedError, match=r"rank 1 \(process \d+\) died while rank 0 waited for it in send"):
        dist.send(torch.ones(3), 1)  # its ring would take it
    return before.tolist(), in_time


def test_a_dead_peer_is_named_and_what_it_had_sent_is_received():
    assert run_ranks(_dies, 2, expect_death=[1])[0] == ([1.0] * 3, True)


def _late():
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 1:
        store.wait(["over"], timedelta(seconds=deadline(30)))
        return None
    work = dist.irecv(torch.zeros(1), 1)
    patience_s = deadline(0.3)
    with pytest.raises(
        CollectiveTimeoutError,
        match=rf"recv from rank 1 of 4 bytes of float32 with tag 0 .* timeout of {patience_s:g} s",
    ):
        work.wait(timedelta(seconds=patience_s))
    store.set("over", "yes")
    return True


def test_a_wait_has_an_end():
    assert run_ranks(_late, 2)[0] is True


def _idle():
    """Waiting for a receive takes no core."""
    if dist.get_rank() == 1:
        time.sleep(1.0)
        dist.send(torch.ones(1), 0)
        return 0.0
    begin = time.process_time()
    dist.recv(torch.zeros(1), 1)
    return time.process_time() - begin


def test_a_rank_that_waits_leaves_its_core_alone():
    assert run_ranks(_idle, 2)[0] < 0.2
