"""200 random programs over 2 to 5 ranks: several groups, operations outstanding, all against numpy."""

import hashlib
import random

import pytest
import torch
import torch.distributed as dist

from hocket import comm
from hocket.testing import run_ranks

from ..random_program import Step, perform

ROUNDS = 10
STEPS = 14


def programs(seed, rounds, device="cpu"):
    me, n = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    sets = [list(range(n))]
    for _ in range(2):
        members = sorted(draw.sample(range(n), draw.randint(2, n)))
        sets.append(members)
    groups = [dist.group.WORLD] + [dist.new_group(members) for members in sets[1:]]
    own_order = random.Random(seed * 100 + me)
    done = 0
    for round_number in range(rounds):
        outstanding = []
        for number in range(STEPS):
            which = draw.randrange(len(sets))
            step = Step(seed * 100_000 + round_number * 1000 + number, which, sets[which], device)
            if me not in sets[which]:
                continue
            work, check = perform(step, groups[which], me)
            outstanding.append((work, check))
            done += 1
            if len(outstanding) > 5:
                _settle(outstanding.pop(own_order.randrange(len(outstanding))))
        own_order.shuffle(outstanding)
        for item in outstanding:
            _settle(item)
    dist.barrier()
    return done


def _settle(item):
    work, check = item
    if work is not None:
        work.wait()
    check()


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed > 3 else []) for seed in range(20)]
)
def test_random_programs_agree_with_numpy(seed):
    n = 2 + seed % 4
    done = run_ranks(programs, n, seed, ROUNDS, timeout_s=100)
    assert max(done) > ROUNDS * STEPS / 3


@pytest.mark.parametrize("n", [2, 3, 5])
def test_float_sums_are_bitwise_equal_on_every_rank_and_from_run_to_run(n):
    first = run_ranks(_digests, n, 5)
    second = run_ranks(_digests, n, 5)
    assert all(of_rank == first[0] for of_rank in first)
    assert first == second


def _digests(seed):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    digests = []
    for numel in (10, 70_000, 900_001):
        for registered in (False, True):
            values = torch.randn(numel, generator=generator)
            tensor = comm.empty(numel).copy_(values) if registered else values
            dist.all_reduce(tensor)
            digests.append(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
    return digests
