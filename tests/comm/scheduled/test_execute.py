"""Schedules run on real tensors: in memory, over shared memory, Gloo and MPI, and say who is missing when one dies."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from hocket.algorithms import REGISTRY, candidates, get
from hocket.cli._bench.world import BenchError, mpiexec, require_mpi
from hocket.comm import (
    CollectiveTimeoutError,
    CommError,
    EndpointExecutor,
    EnginePointToPoint,
    PeerDiedError,
    blocks_after,
    blocks_before,
    open_streams,
    perform,
    reducer,
)
from hocket.comm.scheduled import _scheduled
from hocket.schedule import KINDS, Collective, Schedule, ScheduleError, Step
from hocket.testing import MemoryWorld, deadline, run_ranks, run_schedule

ROOTED = ("reduce", "broadcast", "gather", "scatter")
SUM = ReduceOp.SUM


def expected(collective, row, combine):
    """What every rank must hold, from `row` of shape (rank, block, elements)."""
    results = []
    for rank in range(collective.world):
        blocks = []
        for block in blocks_after(collective, rank):
            owners = [q for q in range(collective.world) if block in blocks_before(collective, q)]
            blocks.append(combine([row[q, block] for q in owners]))
        results.append(torch.cat(blocks) if blocks else None)
    return results


def contributions(collective, row):
    held = [blocks_before(collective, rank) for rank in range(collective.world)]
    return [row[rank, blocks].reshape(-1) if blocks else None for rank, blocks in enumerate(held)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_algorithm_computes_what_its_contract_says(data):
    kind = data.draw(st.sampled_from(KINDS), "kind")
    world = data.draw(st.integers(1, 13), "world")
    collective = Collective(kind, world, data.draw(st.integers(0, world - 1)) if kind in ROOTED else 0)
    algorithm = data.draw(st.sampled_from(candidates(collective)), "algorithm")
    if kind == "barrier":
        return  # has no values
    pieces = data.draw(st.integers(1, 3), "pieces")
    length = data.draw(st.integers(0, 40), "elements of a block")
    row = torch.from_numpy(np.random.default_rng(length).integers(-99, 99, (world, collective.blocks, length)))
    results = run_schedule(algorithm(collective), contributions(collective, row), pieces=pieces)
    for result, want in zip(results, expected(collective, row, sum), strict=True):
        assert (result is None) == (want is None)
        assert want is None or torch.equal(result, want)


@pytest.mark.parametrize(
    ("dtype", "op", "combine"),
    [
        (torch.float64, ReduceOp.MAX, lambda values: torch.stack(values).amax(0)),
        (torch.int16, ReduceOp.MIN, lambda values: torch.stack(values).amin(0)),
        (torch.uint32, ReduceOp.SUM, lambda values: sum(v.to(torch.int64) for v in values).to(torch.uint32)),
        (torch.int64, ReduceOp.BXOR, lambda values: values[0] ^ values[1] ^ values[2] ^ values[3] ^ values[4]),
        (torch.bool, ReduceOp.SUM, lambda values: torch.stack(values).any(0)),
    ],
)
def test_operators_and_types_are_those_of_the_backend(dtype, op, combine):
    collective = Collective("all_reduce", 5)
    row = torch.randint(0, 50, (5, 1, 37), generator=torch.Generator().manual_seed(1)).to(dtype)
    for algorithm in candidates(collective):
        for result, want in zip(
            run_schedule(algorithm(collective), contributions(collective, row), op),
            expected(collective, row, combine),
            strict=True,
        ):
            assert torch.equal(result, want), algorithm.name


@pytest.mark.parametrize("name", [name for name, one in REGISTRY.items() if "all_reduce" in one.kinds])
@pytest.mark.parametrize("world", [3, 4, 7, 16])
def test_all_ranks_get_the_same_bits_and_float_sums_are_near_the_exact_ones(name, world):
    collective = Collective("all_reduce", world)
    if get(name).serves(collective):
        pytest.skip(get(name).serves(collective))
    inputs = list(torch.randn(world, 301, generator=torch.Generator().manual_seed(world)))
    exact = torch.stack(inputs).double().sum(0)
    results = run_schedule(get(name)(collective), inputs)
    assert all(torch.equal(result, results[0]) for result in results)
    # Each of at most world additions rounds by half a unit of a partial sum that is below world * the largest input.
    bound = world * 2**-24 * torch.stack(inputs).abs().sum(0).double()
    assert ((results[0].double() - exact).abs() <= bound + 1e-30).all()


def test_chunks_that_follow_each_other_do_not_wait_for_the_whole_step():
    """In a chain of split chunks the first piece is sent on before the second has come."""
    chain = Schedule("chain", Collective("broadcast", 3), 1, (Step.of(0, 1, reduce=False), Step.of(1, 2, reduce=False)))
    world = MemoryWorld()
    rooms = [torch.arange(8.0) if rank == 0 else torch.zeros(8) for rank in range(3)]
    plays = [
        EndpointExecutor(chain, rank, pieces=2).play(rooms[rank], 8, reducer(SUM, torch.float32), world.endpoint(rank))
        for rank in (1, 2)
    ]
    waits = [next(play, None) for play in plays]
    assert all(wait is not None for wait in waits)
    world.endpoint(0).send(rooms[0][:4], 1)  # the first piece only
    next(plays[0], None)
    assert waits[1][0].done()
    next(plays[1], None)
    assert rooms[2].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_a_schedule_that_cannot_be_played_as_it_is_says_why():
    mixed = Schedule(
        "mixed",
        Collective("all_reduce", 2),
        2,
        (Step.of(0, 2, 0, reduce=True), Step.of(1, 2, 0, 2, reduce=True), Step.of(2, [0, 1], 0, 2, reduce=False)),
        ("s",),
    )
    with pytest.raises(ScheduleError, match=r"mixed, step 1: chunks 0:2 arrive at endpoint 2 where some are there"):
        EndpointExecutor(mixed, 2)


def test_endpoints_that_wait_for_what_nobody_sends_are_named():
    part = Schedule("lost", Collective("broadcast", 2), 1, (Step.of(0, 1, reduce=False),))
    with pytest.raises(CollectiveTimeoutError, match="rank 1 waits for chunks 0:1 from or to rank 0"):
        perform(
            EndpointExecutor(part, 1), torch.zeros(1), 1, reducer(SUM, torch.float32), MemoryWorld().endpoint(1), 0.1
        )


# --- real processes ---------------------------------------------------------------------------------------------------


def _point_to_point(kind):
    if kind == "gloo":
        return EnginePointToPoint(dist.group.WORLD._get_backend(torch.device("cpu")), "gloo")
    store = dist.PrefixStore("streams", dist.group.WORLD.get_group_store())
    return open_streams(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=deadline(30)))


def _run_all(kind, sizes):
    """Each algorithm, several times, against a sum that every rank can work out."""
    rank, world = dist.get_rank(), dist.get_world_size()
    points = _point_to_point(kind)
    collective = Collective("all_reduce", world)
    wrong = []
    for algorithm in candidates(collective):
        schedule = algorithm(collective)
        if schedule.switches:
            continue
        part = EndpointExecutor(schedule, rank, pieces=2)
        for size in sizes:
            for turn in range(3):
                data = torch.arange(size) * (rank + 1) + turn
                perform(part, data, size, reducer(SUM, data.dtype), points, 30)
                if not torch.equal(data, torch.arange(size) * (world * (world + 1) // 2) + turn * world):
                    wrong.append((algorithm.name, size, turn))
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gloo", "shared memory"])
@pytest.mark.parametrize("world", [2, 5])
def test_real_ranks_compute_the_same(kind, world):
    assert run_ranks(_run_all, world, kind, (1, 1000, 300_000), backend="gloo") == [[]] * world


def _ends_in_the_middle(kind):
    rank, world = dist.get_rank(), dist.get_world_size()
    points = _point_to_point(kind)
    part = EndpointExecutor(get("ring")(Collective("all_reduce", world)), rank)
    data = torch.ones(100_000)
    op = reducer(SUM, data.dtype)
    perform(part, data, len(data), op, points, 30)
    if rank == 1:
        os.kill(os.getpid(), 9)
    begin = time.monotonic()
    try:
        perform(part, data, len(data), op, points, 20)
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", 0.0


def test_over_shared_memory_the_neighbour_of_a_dead_rank_says_so_within_five_seconds():
    results = run_ranks(_ends_in_the_middle, 2, "shared memory", backend="gloo", expect_death=[1])
    name, text, took_s = results[0]
    assert name == PeerDiedError.__name__
    assert "rank 1 died" in text
    assert took_s < deadline(5)


def test_over_an_engine_a_dead_rank_is_an_error_that_names_the_step():
    results = run_ranks(_ends_in_the_middle, 2, "gloo", backend="gloo", expect_death=[1])
    name, text, took_s = results[0]
    assert name == CommError.__name__
    assert "ring all_reduce world=2, step" in text
    assert "rank 1" in text
    assert took_s < deadline(5)


def _nobody_comes(kind):
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 1:
        store.wait(["over"], timedelta(seconds=deadline(30)))
        return None
    points = _point_to_point(kind)
    part = EndpointExecutor(get("ring")(Collective("all_reduce", 2)), 0)
    data = torch.ones(10)
    try:
        perform(part, data, 10, reducer(SUM, data.dtype), points, 0.5)
    except CollectiveTimeoutError as error:
        return str(error), error.missing
    finally:
        store.set("over", "yes")
    return None


def test_a_wait_has_an_end():
    text, missing = run_ranks(_nobody_comes, 2, "gloo", backend="gloo")[0]
    assert "ring all_reduce world=2, step 0: rank 0 waits for chunks" in text
    assert missing == (1,)


@pytest.mark.long
def test_inside_mpirun_schedules_run_over_mpi(tmp_path):
    try:
        require_mpi()
    except BenchError as error:
        pytest.skip(str(error))
    script = tmp_path / "program.py"
    script.write_text(
        """
import torch
from mpi4py import MPI
from hocket.algorithms import get
from hocket.comm import MpiPointToPoint, EndpointExecutor, perform, reducer
from hocket.schedule import Collective

world = MPI.COMM_WORLD
points = MpiPointToPoint(world.Dup())
for name in ("ring", "halving_doubling", "double_tree"):
    data = torch.arange(50_000, dtype=torch.float64) * (world.rank + 1)
    part = EndpointExecutor(get(name)(Collective("all_reduce", world.size)), world.rank, pieces=2)
    perform(part, data, len(data), reducer(torch.distributed.ReduceOp.SUM, data.dtype), points, 30)
    assert torch.equal(data, torch.arange(50_000, dtype=torch.float64) * 6), name
print("right", flush=True)
"""
    )
    command = [
        mpiexec(),
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "3",
        sys.executable,
        script,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=deadline(90))
    assert done.stdout.count("right") == 3, done.stderr


@pytest.mark.parametrize(
    ("name", "kind", "cut"),
    [
        ("double_tree", "all_reduce", True),
        ("chain", "broadcast", True),
        ("binomial", "broadcast", False),  # its root sends all the time
        ("ring", "all_reduce", False),
        ("halving_doubling", "all_reduce", False),
        ("direct", "all_reduce", False),
    ],
)
def test_messages_are_cut_where_ranks_would_wait_and_not_where_links_are_busy(name, kind, cut):
    assert _scheduled._leaves_idle(name, (), kind, 8, 0) is cut
