import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hocket.testing import RankError, deadline, no_leftovers, run_ranks


def _sum_of_ranks(extra):
    tensor = torch.tensor([dist.get_rank() + extra])
    dist.all_reduce(tensor)
    return dist.get_backend(), tensor.item()


def _no_group():
    return dist.is_initialized(), os.environ["RANK"], os.environ["MASTER_ADDR"]


def _fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("one is broken")
    dist.barrier()


def _sleep(seconds):
    time.sleep(seconds)


def _kill_self_on_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


@pytest.mark.parametrize("backend", ["gloo", "hocket"])
def test_results_come_in_the_order_of_ranks(backend):
    assert run_ranks(_sum_of_ranks, 3, 10, backend=backend) == [(backend, 33)] * 3


def _tensors():
    rank = dist.get_rank()
    return {"made": torch.arange(3) + rank, "part": torch.ones(2, 4)[:, rank], "half": torch.zeros(2).half()}


def test_tensors_may_be_returned():
    ranks = run_ranks(_tensors, 2)
    assert [r["made"].tolist() for r in ranks] == [[0, 1, 2], [1, 2, 3]]
    assert ranks[1]["part"].tolist() == [1.0, 1.0]
    assert ranks[0]["half"].dtype is torch.float16


def test_a_result_that_cannot_be_pickled_is_the_ranks_error():
    with pytest.raises(RankError, match="pickle"):
        run_ranks(_lambda, 2)


def _lambda():
    return lambda: None


def test_without_a_group_the_environment_is_torchruns():
    assert run_ranks(_no_group, 2, backend=None) == [(False, "0", "127.0.0.1"), (False, "1", "127.0.0.1")]


def test_the_first_failing_ranks_traceback_is_raised():
    with pytest.raises(RankError, match="one is broken") as caught:
        run_ranks(_fail_on_one, 2)
    assert caught.value.rank == 1


def test_a_function_of_a_notebook_is_said_to_be_out_of_the_ranks_reach(monkeypatch):
    def cell():
        pass

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.setattr(sys.modules["__main__"], "cell", cell, raising=False)
    with pytest.raises(RankError, match="died with exit code 1\nIt could not load the function.*not in a notebook"):
        run_ranks(cell, 2)


@pytest.mark.long
def test_a_deadline_ends_everything_and_shows_where_ranks_hang():
    begin = time.monotonic()
    with no_leftovers(), pytest.raises(RankError, match="had not ended") as caught:
        run_ranks(_sleep, 2, 600, backend=None, timeout_s=1)
    assert time.monotonic() - begin < deadline(15)
    assert "in _sleep" in caught.value.traceback


def test_an_expected_death_is_no_failure():
    assert run_ranks(_kill_self_on_one, 3, expect_death={1}) == [0, None, 2]
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_kill_self_on_one, 2)


def _fork_a_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_no_leftovers_sees_a_process_that_stays():
    left = []
    with pytest.raises(AssertionError, match="left behind"), no_leftovers(within_s=0.2):
        left.append(_fork_a_sleeper())
    os.kill(left[0], signal.SIGKILL)
    os.waitpid(left[0], 0)
