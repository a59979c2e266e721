"""Frames: everyone's reach everyone in order, whatever their lengths and however far ranks run ahead of each other."""

import queue
import random
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.comm.scheduled import FlatFrames, TwoLevelFrames, frame_capacity
from hocket.testing import deadline
from tests.comm.thread_world import ThreadWorld


class Pending:
    """A receive; a shorter message fills the front, as in Gloo."""

    def __init__(self, flat, lane):
        self._flat, self._lane = flat, lane

    def wait(self, timeout_s):
        data = self._lane.get(timeout=timeout_s)
        self._flat[: data.numel()] = data


class Sent:
    def wait(self, timeout_s):
        pass


class Points:
    """Messages between threads; the engine's rule that a receive is posted before its message is taken is checked."""

    def __init__(self, lanes, rank):
        self._lanes, self._rank = lanes, rank

    def send(self, flat, peer):
        self._lanes[self._rank, peer].put(flat.clone())
        return Sent()

    def receive(self, flat, peer):
        return Pending(flat, self._lanes[peer, self._rank])


@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 9), seed=st.integers(0, 999))
def test_everyones_frames_reach_everyone(size, seed):
    draw = random.Random(seed)
    most = frame_capacity(size)
    lengths = [[draw.choice([0, 1, 16, 100, most]) for _ in range(size)] for _ in range(4)]
    lanes = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    wrong = []

    def play(rank):
        frames = FlatFrames(Points(lanes, rank), rank, size, most)
        for turn, of_ranks in enumerate(lengths):
            payload = torch.full((of_ranks[rank],), rank + 1, dtype=torch.uint8)
            frames.begin(bytes([turn, rank] * 12), payload if len(payload) else None, deadline(20))
            for r, frame in enumerate(frames.finish(deadline(20))):
                if frame.contract != bytes([turn, r] * 12) or frame.payload.tolist() != [r + 1] * of_ranks[r]:
                    wrong.append((rank, turn, r))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(30))
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@settings(max_examples=8, deadline=None)
@given(hosts=st.integers(2, 4), local=st.integers(2, 3), seed=st.integers(0, 999))
def test_frames_go_through_the_memory_of_hosts_whatever_their_lengths(hosts, local, seed):
    draw = random.Random(seed)
    size = hosts * local
    most = frame_capacity(size, local=local)
    lengths = [[draw.choice([0, 1, 16, 2048, 2064, most]) for _ in range(size)] for _ in range(5)]
    lanes = {(a, b): queue.SimpleQueue() for a in range(hosts) for b in range(hosts)}
    order = draw.sample(range(size), size)  # ranks of a host need not follow each other
    layout = [sorted(order[host * local : (host + 1) * local]) for host in range(hosts)]
    worlds = [ThreadWorld(local) for _ in layout]
    wrong = []

    def play(host, place):
        rank = layout[host][place]
        frames = TwoLevelFrames(layout, rank, worlds[host].transports[place], Points(lanes, host), most)
        for turn, of_ranks in enumerate(lengths):
            payload = torch.full((of_ranks[rank],), rank + 1, dtype=torch.uint8)
            contract = bytes([turn, turn == 3 and rank] * 12)
            alike = frames.begin(contract, payload if len(payload) else None, deadline(20))
            if alike != (turn != 3):
                wrong.append((rank, turn))
            for r, frame in enumerate(frames.finish(deadline(20))):
                said = bytes([turn, turn == 3 and r] * 12)
                if frame.contract != said or frame.payload.tolist() != [r + 1] * of_ranks[r]:
                    wrong.append((rank, turn, r))

    threads = [threading.Thread(target=play, args=(h, p)) for h in range(hosts) for p in range(local)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(30))
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_frames_of_large_groups_stay_small():
    assert frame_capacity(2) == 64 << 10
    assert all((world - 1) * frame_capacity(world) <= 64 << 10 for world in (2, 3, 16, 1000, 100_000))
    assert all((world - 8) * frame_capacity(world, local=8) <= 32 << 10 for world in (16, 1000, 100_000))
