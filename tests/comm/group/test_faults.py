"""Ranks that die, stop, leave or disagree: the others hear of it within seconds, and nothing is left behind."""

import errno
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hocket import comm
from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from hocket.comm import torch_adapter as c10d
from hocket.testing import deadline, no_leftovers, run_ranks

DETECTION_S = 5.0


def _endless_operations(seed):
    """Random collectives until one raises."""
    draw = random.Random(seed)
    n = dist.get_world_size()
    registered = comm.zeros(400_000)
    while True:
        kind = draw.choice(
            ("all_reduce", "registered", "async", "all_gather", "broadcast", "reduce_scatter", "barrier")
        )
        numel = draw.choice((1, 1000, 70_000, 600_000))
        if kind == "all_reduce":
            dist.all_reduce(torch.zeros(numel))
        elif kind == "registered":
            dist.all_reduce(registered)
        elif kind == "async":
            for work in [dist.all_reduce(torch.zeros(numel), async_op=True) for _ in range(3)]:
                work.wait()
        elif kind == "all_gather":
            dist.all_gather([torch.zeros(numel) for _ in range(n)], torch.zeros(numel))
        elif kind == "broadcast":
            dist.broadcast(torch.zeros(numel), draw.randrange(n))
        elif kind == "reduce_scatter":
            dist.reduce_scatter(torch.zeros(numel), [torch.zeros(numel) for _ in range(n)])
        else:
            dist.barrier()


def _killed_at_a_random_moment(seed, victim, delay_s, path):
    me = dist.get_rank()
    if me == victim:

        def die():
            time.sleep(delay_s)
            Path(path).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    try:
        _endless_operations(seed)
    except Exception as error:
        return time.monotonic(), type(error).__name__, str(error), isinstance(error, CommError)


@pytest.mark.long
@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.long) for batch in range(1, 5))])
def test_fifty_kills_at_random_moments(batch):
    with no_leftovers(), tempfile.TemporaryDirectory() as directory:
        for number in range(10):
            seed = batch * 10 + number
            draw = random.Random(seed)
            n = draw.randint(2, 4)
            victim = draw.randrange(n)
            path = os.path.join(directory, str(seed))
            results = run_ranks(
                _killed_at_a_random_moment, n, seed, victim, draw.random() * 0.3, path, expect_death={victim}
            )
            killed_s = float(Path(path).read_text())
            for rank, result in enumerate(results):
                if rank == victim:
                    assert result is None
                    continue
                raised_s, name, text, is_comm_error = result
                assert is_comm_error, (seed, name, text)
                assert raised_s - killed_s < deadline(DETECTION_S), (seed, name, text)
                assert name == "PeerDiedError", (seed, name, text)
                assert f"rank {victim} " in text, (seed, text)
                assert re.search(r"(all_reduce|all_gather|broadcast|reduce_scatter|barrier) #\d+", text), (seed, text)


def _one_stops(seconds):
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(4), group=group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except CollectiveTimeoutError as error:
        return str(error), error.missing, time.monotonic() - begin


@pytest.mark.long
def test_a_stopped_rank_is_a_timeout_that_names_it():
    with no_leftovers():
        found = run_ranks(_one_stops, 3, 2, timeout_s=30, expect_death={1}, allow_late={1})
    for rank in (0, 2):
        text, missing, waited_s = found[rank]
        assert missing == (1,)
        assert "rank 1 was last at all_reduce #1" in text
        assert "all_reduce #2" in text
        assert 1.5 < waited_s < deadline(5)


def _one_leaves():
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        return None
    try:
        dist.barrier()
    except PeerDiedError as error:
        return error.rank, str(error)


def test_a_rank_that_ends_without_the_others_is_named():
    found = run_ranks(_one_leaves, 3)
    for rank in (1, 2):
        assert found[rank][0] == 0
        assert "rank 0 has left" in found[rank][1]


def _ends_because_of_another(path):
    """Rank 0 dies in a group that rank 2 is not in; rank 1 ends of it, and rank 2 waits for rank 1."""
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if dist.get_rank() == 1:
            try:
                dist.all_reduce(torch.ones(4), group=pair)
            finally:
                dist.destroy_process_group()
        elif path == "message":
            dist.recv(torch.ones(4), 1, group=other)
        else:
            dist.all_reduce(torch.ones(4), group=other)
    except PeerDiedError as error:
        return str(error)


@pytest.mark.parametrize("path", ["message", "collective"])
def test_who_waits_for_a_rank_that_ends_because_of_another_hears_of_that_one(path):
    found = run_ranks(_ends_because_of_another, 3, path, expect_death={0})
    assert "rank 0 (process" in found[1]
    assert "rank 1 has left (PeerDiedError: rank 0 (process" in found[2]


def _one_fails_inside():
    work = dist.all_reduce(torch.ones(100), async_op=True)
    work.wait()
    try:
        outputs = [torch.ones(3), torch.ones(3)]
        if dist.get_rank() == 1:
            with mock.patch("hocket.comm.shm._exchange.cut", side_effect=ValueError("in the middle")):
                dist.all_gather(outputs, torch.ones(3))
        else:
            dist.all_gather(outputs, torch.ones(3))
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    try:
        dist.barrier()
    except CommError as error:
        return first, str(error)


def test_an_error_on_one_rank_reaches_the_others_with_its_text():
    found = run_ranks(_one_fails_inside, 2)
    assert "in the middle" in found[1][0]
    assert "rank 1 failed in all_gather #2" in found[0][0]
    assert "in the middle" in found[0][0]
    assert all("failed" in later for _, later in found)


def _scale_without_the_others(numel):
    data = torch.ones(numel)
    scaled = dist._make_nccl_premul_sum(0.5)
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(data, scaled if dist.get_rank() == 0 else dist.ReduceOp.SUM)
    return bool((data == 1).all())


@pytest.mark.parametrize("numel", [10, 400_000])
def test_a_scaled_sum_that_no_other_rank_asks_for_leaves_the_tensor_as_it_is(numel):
    assert run_ranks(_scale_without_the_others, 2, numel) == [True] * 2


def _splits_in_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        expected = 2 if dist.get_rank() == 1 else 3
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_to_all_single(torch.ones(2 + expected), torch.ones(4), [2, expected], [2, 2], group=group)
        return str(caught.value)
    return None


def test_split_sizes_that_differ_name_ranks_of_the_world():
    assert "rank 3 sends 2 elements to rank 3, which expects 3" in run_ranks(_splits_in_a_subgroup, 4)[1]


def _disagree(case):
    me = dist.get_rank()
    odd = me == 1
    try:
        if case == "size":
            dist.all_reduce(torch.ones(5 + odd))
        elif case == "type":
            dist.all_reduce(torch.ones(5, dtype=torch.float64 if odd else torch.float32))
        elif case == "operator":
            dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
        elif case == "operation":
            if odd:
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(5))
        elif case == "asynchronous":
            dist.all_reduce(torch.ones(5 + odd), async_op=True).wait()
    except CollectiveMismatchError as error:
        after = torch.ones(3)
        dist.all_reduce(after)
        return str(error), after.tolist()


def _disagree_by_threads():
    """Each rank calls in two threads, in another order."""
    said, over = queue.Queue(), threading.Event()

    def call(numel):
        try:
            dist.all_reduce(torch.ones(numel))
        except CollectiveMismatchError as error:
            said.put(str(error))
        over.wait(deadline(20))

    texts = []
    for numel in (10, 1000)[:: 1 - 2 * dist.get_rank()]:
        threading.Thread(target=call, args=(numel,), name=f"of {numel}").start()
        texts.append(said.get(timeout=deadline(20)))
    over.set()
    return texts


def test_where_threads_have_called_a_disagreement_names_them():
    for rank, said in enumerate(run_ranks(_disagree_by_threads, 2)):
        first, second = (("of 10", "of 1000"), ("of 1000", "of 10"))[rank]
        assert f"operations of this group were called in thread {first!r}: if two" in said[0]
        assert f"operations of this group were called in thread {first!r}, {second!r}: if two" in said[1]


@pytest.mark.parametrize("case", ["size", "type", "operator", "operation", "asynchronous"])
def test_disagreement_is_an_error_on_all_ranks_and_the_group_stays_usable(case):
    for text, after in run_ranks(_disagree, 3, case):
        assert "disagree at operation #1" in text
        assert "rank 1:" in text
        assert "ranks 0, 2:" in text
        assert after == [3.0] * 3


def _errors_in_a_subgroup():
    me = dist.get_rank()
    group = dist.new_group([1, 3])
    if me == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 1:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except PeerDiedError as error:
            return str(error)
    return None


def test_messages_count_ranks_as_the_world_does():
    found = run_ranks(_errors_in_a_subgroup, 4, expect_death={3})
    assert "rank 3 " in found[1]
    assert "while rank 1 waited" in found[1]


def _queue_behind_a_death():
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    texts = []
    for work in works:
        with pytest.raises(PeerDiedError) as caught:
            work.wait()
        texts.append(str(caught.value))
    with pytest.raises(PeerDiedError) as caught:
        dist.barrier()
    return texts, caught.value.__notes__


def test_everything_queued_behind_a_death_ends_with_its_error():
    texts, notes = run_ranks(_queue_behind_a_death, 2, expect_death={1}, timeout_s=20)[0]
    assert len(texts) == 3
    assert notes == ["That was before: group '0' is over, for all of this program. Start the ranks again."]
    assert all("rank 1 " in text and "died" in text for text in texts)


def _no_thread_at_first():
    peer, total = 1 - dist.get_rank(), torch.ones(4)
    lost, message = torch.zeros(2), torch.zeros(2)
    for post in (lambda: dist.irecv(lost, peer), lambda: dist.all_reduce(total, async_op=True)):
        refused = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        start = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
        with mock.patch.object(threading, start, refused), pytest.raises(RuntimeError, match="thread"):
            post()
    works = [dist.irecv(message, peer), dist.isend(torch.ones(2), peer), dist.all_reduce(total, async_op=True)]
    for work in works:
        work.wait(timedelta(seconds=20))
    return lost.tolist(), message.tolist(), total.tolist(), dist.group.WORLD._get_sequence_number_for_group()


def test_what_was_not_posted_for_want_of_a_thread_can_be_posted_again():
    assert run_ranks(_no_thread_at_first, 2) == [([0, 0], [1, 1], [2] * 4, 1)] * 2


def _gradients_behind_a_death(hook):
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 8)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
def test_back_propagation_in_ddp_ends_with_the_error_that_names_the_rank(hook):
    text, _ = run_ranks(_gradients_behind_a_death, 2, hook, expect_death={1})
    assert re.search(r"PeerDiedError: rank 1 \(process \d+\) died while rank 0 waited for it", text)


def _a_peers_memory_is_out_of_sight(dies):
    from hocket.comm.shm import _all_reduce

    plain = _all_reduce.registration_cache.lookup

    def lookup(pid, nonce, place):
        if not dies:
            raise OSError(errno.EMFILE, "Too many open files")
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        return plain(pid, nonce, place)

    registered = comm.zeros(400_000)
    if dist.get_rank() == 0:
        _all_reduce.registration_cache.lookup = lookup
    with pytest.raises(CommError) as caught:
        dist.all_reduce(registered)
    return type(caught.value), str(caught.value)


def test_a_death_before_the_registered_buffer_was_mapped_is_a_death():
    kind, text = run_ranks(_a_peers_memory_is_out_of_sight, 2, True, expect_death={1}, timeout_s=20)[0]
    assert kind is PeerDiedError
    assert re.search(r"rank 1 .* died .* all_reduce #1", text)


def test_a_registered_buffer_that_cannot_be_mapped_is_an_error_on_all_ranks():
    (_, mine), (_, theirs) = run_ranks(_a_peers_memory_is_out_of_sight, 2, False, timeout_s=20)
    assert "rank 0 cannot map the registered buffer of rank 1 in all_reduce #1" in mine
    assert "Too many open files" in mine
    assert "rank 0 failed in all_reduce #1" in theirs


def _late_for_a_group(folder):
    """Rank 1 comes to make a group when others have given it up."""
    end_s = time.monotonic() + deadline(20)
    while dist.get_rank() == 1 and len(list(folder.iterdir())) < 2 and time.monotonic() < end_s:
        time.sleep(0.02)
    try:
        dist.new_group([0, 1, 2], timeout=timedelta(seconds=1.5))
    except CollectiveTimeoutError as error:
        return str(error), error.missing, error.culprits
    finally:
        (folder / str(dist.get_rank())).touch()


def test_who_does_not_come_to_make_a_group_is_named(tmp_path):
    for rank, (text, missing, culprits) in enumerate(run_ranks(_late_for_a_group, 3, tmp_path)):
        others = (0, 2) if rank == 1 else (1,)
        assert missing == culprits == others
        assert text.endswith("given up by ranks 0, 2" if rank == 1 else "not arrived: rank 1")


def _timeouts():
    before = dist.group.WORLD.timeout.total_seconds()
    inherited = dist.new_group([0, 1]).timeout.total_seconds()
    given = dist.new_group([0, 1], timeout=timedelta(seconds=77)).timeout.total_seconds()
    os.environ["HOCKET_TIMEOUT"] = "55"
    setting = dist.new_group([0, 1]).timeout.total_seconds()
    os.environ["HOCKET_TIMEOUT"] = "soon"
    try:
        dist.new_group([0, 1])
    except ValueError as error:
        return before, inherited, given, setting, str(error)


def test_a_group_without_a_time_out_of_its_own_has_the_world_s_or_the_variable_s():
    for before, inherited, given, setting, text in run_ranks(_timeouts, 2):
        assert inherited == before
        assert (given, setting) == (77, 55)
        assert text.startswith("HOCKET_TIMEOUT=soon: give the seconds")


def _wrong_arguments():
    """Every call is wrong on every rank; then one that is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard  # which takes a second to load: not in every test's ranks

    n, world = dist.get_world_size(), dist.group.WORLD
    one, two, whole = torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.float64)
    row = [torch.ones(3) for _ in range(n)]
    divided = DTensor.from_local(one, init_device_mesh("cpu", (n,)), [Shard(0)])
    calls = [
        lambda: dist.broadcast(one, src=9),
        lambda: world.broadcast([one], _rooted(c10d.BroadcastOptions(), n)),
        lambda: world.reduce([one], _rooted(c10d.ReduceOptions(), -1)),
        lambda: world.gather([row], [one], _rooted(c10d.GatherOptions(), n)),
        lambda: world.scatter([one], [row], _rooted(c10d.ScatterOptions(), n)),
        lambda: world.send([one], n, 0),
        lambda: world.recv([one], n, 0),
        lambda: dist.all_gather(row[1:], one),
        lambda: dist.all_gather([*row[1:], two], one),
        lambda: world.allgather([[*row[1:], whole]], [one]),
        lambda: dist.all_gather_single(torch.ones(3 * n, dtype=torch.float64), one),
        lambda: world.gather([row[1:]], [one], _rooted(c10d.GatherOptions(), dist.get_rank())),
        lambda: world.scatter([one], [[two, *row[1:]]], _rooted(c10d.ScatterOptions(), dist.get_rank())),
        lambda: dist.reduce_scatter(one, row[1:]),
        lambda: world.reduce_scatter([whole], [row]),
        lambda: dist.reduce_scatter_single(whole, torch.ones(3 * n)),
        lambda: dist.all_to_all(row[1:], row),
        lambda: dist.all_to_all([], []),
        lambda: dist.all_to_all([whole, *row[1:]], row),
        lambda: dist.all_to_all_single(torch.ones(n, dtype=torch.int64), torch.ones(n)),
        lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n), [n + 1] + [0] * (n - 1)),
        lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n), [n + 1, -1], [n + 1, -1]),
        lambda: dist.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(divided),
        lambda: dist.all_gather([divided] * n, torch.ones(3 * n)),
        lambda: world.send([divided], 1 - dist.get_rank(), 0),
        lambda: world.recv([divided], 1 - dist.get_rank(), 0),
        # All elements of these are one in memory, where no result of several can be written.
        lambda: dist.all_reduce(torch.ones(1).expand(3)),
        lambda: dist.all_reduce_coalesced([one, torch.ones(1).expand(3)]),
        lambda: world.broadcast([torch.ones(1).expand(3)], _rooted(c10d.BroadcastOptions(), 1 - dist.get_rank())),
        lambda: world.reduce([torch.ones(1).expand(3)], _rooted(c10d.ReduceOptions(), dist.get_rank())),
        lambda: dist.all_gather([torch.ones(1).expand(3)] * n, one),
        lambda: dist.all_gather_single(torch.ones(1).expand(3 * n), one),
        lambda: dist.reduce_scatter_single(torch.ones(1).expand(3), torch.ones(3 * n)),
        lambda: dist.all_to_all_single(torch.ones(1).expand(n), torch.ones(n)),
        lambda: world.gather([[torch.ones(1).expand(3)] * n], [one], _rooted(c10d.GatherOptions(), dist.get_rank())),
        lambda: world.scatter([torch.ones(1).expand(3)], [row], _rooted(c10d.ScatterOptions(), dist.get_rank())),
        lambda: world.recv([torch.ones(1).expand(3)], 1 - dist.get_rank(), 0),
        lambda: world.recv_anysource([torch.ones(1).expand(3)], 0),
    ]
    accepted = []
    for number, call in enumerate(calls):
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, CommError):
                accepted.append((number, str(error)))
            continue
        accepted.append((number, "accepted"))
    dist.all_reduce(one)
    return accepted, one.tolist()


def _rooted(options, root):
    options.rootRank = root
    return options


def test_a_wrong_argument_is_refused_before_anything_is_posted():
    assert run_ranks(_wrong_arguments, 2) == [([], [2.0] * 3)] * 2
