"""The process group with an aggregator: the same results, whatever happens to the aggregator meanwhile."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hocket import comm
from hocket.aggregator import Level
from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, CommError
from hocket.comm.aggregated._tree_position import TreePosition, tree_position
from hocket.profile import Recorder
from hocket.testing import deadline, run_ranks

from ..group.test_hosts import _mismatches
from ..group.test_random_operations import programs
from ..host_world import on_hosts, run

TOKEN = "the token of these tests, long enough"


class Process:
    """An aggregator in a process of its own, always at the same address."""

    def __init__(self, directory, *options):
        Path(directory).mkdir(exist_ok=True)
        self.options = options
        self.token_file = Path(directory) / "token"
        self.token_file.touch(0o600)
        self.token_file.write_text(TOKEN)
        self._address_file = Path(directory) / "address"
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        self._address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "hocket", "aggregator", "--listen", self.address, "--json"]
        self.process = subprocess.Popen(
            [*command, "--token-file", str(self.token_file), "--address-file", str(self._address_file), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        deadline_s = time.monotonic() + deadline(20)
        while not self._address_file.exists():
            assert time.monotonic() < deadline_s
            assert self.process.poll() is None
            time.sleep(0.02)
        self.address = self._address_file.read_text().strip()

    def kill(self):
        self.process.kill()
        self.process.wait(deadline(10))
        self.process.stdout.close()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=deadline(10))[0]

    def environment(self, **more):
        return {
            "HOCKET_AGGREGATOR": self.address,
            "HOCKET_AGGREGATOR_TOKEN_FILE": str(self.token_file),
            "HOCKET_AGGREGATOR_STALL_S": "1",
            **more,
        }


@contextmanager
def _started(directory, *options):
    process = Process(directory, *options)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture
def aggregator(tmp_path):
    with _started(tmp_path) as process:
        yield process


def _stats():
    (stats,) = comm.aggregation_stats().values()
    return stats


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [[0, 1, 2], [0, 0, 1, 1]], ids=["one rank a host", "two hosts of two"])
def test_random_programs_agree_with_numpy(aggregator, layout):
    assert min(run(layout, programs, 3, 6, env=aggregator.environment())) > 10


def _each_operation():
    me, n = dist.get_rank(), dist.get_world_size()
    paths = {}

    def note(name, action):
        with Recorder() as recorder:
            action()
        (paths[name],) = recorder.paths()

    data = torch.arange(1000, dtype=torch.float64) + me
    note("all_reduce", lambda: dist.all_reduce(data))
    assert torch.equal(data, n * torch.arange(1000, dtype=torch.float64) + sum(range(n)))
    average = torch.full((7,), float(me))
    note("average", lambda: dist.all_reduce(average, ReduceOp.AVG))
    assert (average == (n - 1) / 2).all()
    note("max", lambda: dist.all_reduce(torch.tensor([me]), ReduceOp.MAX))
    brain = torch.full((9,), 1.0 + me, dtype=torch.bfloat16)
    note("bfloat16", lambda: dist.all_reduce(brain))
    assert (brain == sum(range(1, n + 1))).all()
    reduced = torch.full((50,), me)
    note("reduce", lambda: dist.reduce(reduced, 1))
    assert (reduced == (sum(range(n)) if me == 1 else me)).all()
    sent = torch.full((50,), me)
    note("broadcast", lambda: dist.broadcast(sent, 2))
    assert (sent == 2).all()
    gathered = [torch.zeros(5) for _ in range(n)]
    note("all_gather", lambda: dist.all_gather(gathered, torch.full((5,), float(me))))
    assert all((one == r).all() for r, one in enumerate(gathered))
    scattered = torch.zeros(5)
    parts = [torch.full((5,), float(r * me)) for r in range(n)]
    note("reduce_scatter", lambda: dist.reduce_scatter(scattered, parts))
    assert (scattered == me * sum(range(n))).all()
    note("barrier", dist.barrier)
    product = torch.tensor([me + 1])
    note("product", lambda: dist.all_reduce(product, ReduceOp.PRODUCT))
    note("flags", lambda: dist.all_reduce(torch.tensor([True]), ReduceOp.MIN))
    received = [torch.zeros(3) for _ in range(n)]
    note("all_to_all", lambda: dist.all_to_all_single(torch.zeros(n), torch.ones(n)))
    note("gather", lambda: dist.gather(torch.ones(3), received if me == 0 else None, 0))
    return paths, _stats()


def test_what_the_aggregator_can_do_goes_there_and_the_rest_elsewhere_and_both_are_counted(aggregator):
    for paths, stats in run([0, 1, 2], _each_operation, env=aggregator.environment()):
        elsewhere = {"product", "flags", "all_to_all", "gather"}
        assert {name for name, path in paths.items() if path != "aggregator"} == elsewhere, paths
        assert (stats.served, stats.elsewhere, stats.failures) == (9, 4, 0)
    assert '"all_reduce": 4' in aggregator.stop()


def _in_tree(addresses, order, *args):
    os.environ["HOCKET_AGGREGATOR"] = addresses[order[int(os.environ["RANK"])]]
    return on_hosts(range(9), *args)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1, 0]], ids=["in order", "in turn"])
def test_leaves_with_a_parent_serve_their_ranks_in_any_order(tmp_path, order):
    with (
        _started(tmp_path / "root") as root,
        _started(tmp_path / "one", "--parent", root.address, "--name", "leaf one") as one,
        _started(tmp_path / "two", "--parent", root.address) as two,
    ):
        addresses = one.address, two.address
        environment = one.environment()
        outcome = run_ranks(_in_tree, 3, addresses, order, _each_operation, backend=None, timeout_s=60, env=environment)
        assert [stats.served for _, stats in outcome] == [9] * 3
        assert '"all_reduce": 4' in two.stop()


def _long_and_short():
    me, n = dist.get_rank(), dist.get_world_size()
    for numel in (10, 100_003, 10, 20):
        data = torch.full((numel,), float(me))
        dist.all_reduce(data)
        assert (data == sum(range(n))).all()
        sent = torch.arange(numel) + me
        dist.broadcast(sent, 1)
        assert torch.equal(sent, torch.arange(numel) + 1)
    return _stats().served


@pytest.mark.long
def test_two_aggregators_share_long_messages_and_take_turns_with_short_ones(tmp_path):
    with _started(tmp_path / "one") as one, _started(tmp_path / "two") as two:
        environment = one.environment(HOCKET_AGGREGATOR=f"{one.address},{two.address}")
        assert run([0, 1, 2], _long_and_short, env=environment) == [8] * 3
        counts = [json.loads(process.stop())["operations"] for process in (one, two)]
    assert sum(count["all_reduce"] for count in counts) == 5
    assert sum(count["broadcast"] for count in counts) == 5
    assert [sum(count.values()) for count in counts] == [5, 5]


@pytest.mark.long
def test_one_of_two_aggregators_that_dies_changes_no_result(tmp_path):
    with _started(tmp_path / "one") as one, _started(tmp_path / "two") as two:

        def disturb(mark):
            _wait_for(mark, 10)
            two.kill()
            two.start()

        one.environment, plain = (
            lambda: {**plain(), "HOCKET_AGGREGATOR": f"{one.address},{two.address}"},
            one.environment,
        )
        stats = _disturbed(tmp_path, one, disturb, steps=150, numel=100_000, pause_s=0.02)
    assert all(one.failures >= 1 and one.returns >= 1 for one in stats), stats


def test_tree_positions_of_ranks_at_leaves():
    assert tree_position(["a"] * 3, 1) == TreePosition((0, 1, 2), 1, (Level(3, 1, 1, 1),))
    turned = [tree_position(["a", "b", "a"], r) for r in range(3)]
    assert {one.order for one in turned} == {(0, 2, 1)}
    assert {one.positions for one in turned} == {(0, 2, 1)}
    assert [one.levels for one in turned] == [
        (Level(2, 0, 0, 1), Level(2, 0, 0, 2)),
        (Level(1, 0, 2, 1), Level(2, 1, 2, 1)),
        (Level(2, 1, 1, 1), Level(2, 0, 0, 2)),
    ]


def _told(addresses):
    address = addresses[int(os.environ["RANK"])]
    if not address:
        del os.environ["HOCKET_AGGREGATOR"]
    return on_hosts(range(9), _untold)


def _untold():
    data = torch.ones(10)
    dist.all_reduce(data)
    return float(data[0]), comm.aggregation_stats()


def test_ranks_of_which_some_are_not_told_of_the_aggregator_do_without(aggregator):
    outcome = run_ranks(_told, 2, ["x", ""], backend=None, timeout_s=60, env=aggregator.environment())
    assert outcome == [(2.0, {})] * 2


def _located(dtypes):
    return [_located_in(dtype) for dtype in dtypes]


def _located_in(dtype):
    me = dist.get_rank()
    values = torch.tensor([3, 1, 5 - me, me, 7], dtype=dtype).view(5, 1)
    low, where_low = comm.minloc(values)
    high, where_high = comm.maxloc(values, torch.full((5, 1), 10 * me))
    return [t.flatten().tolist() for t in (low, where_low, high, where_high)]


@pytest.mark.parametrize("layout", [[0, 1, 2], [0, 0, 0]], ids=["aggregator", "shared memory"])
def test_minloc_and_maxloc(aggregator, layout):
    want = [[3, 1, 3, 0, 7], [0, 0, 2, 0, 0], [3, 1, 5, 2, 7], [0, 0, 0, 20, 0]]
    dtypes = [torch.int16, torch.bfloat16, torch.float64]
    assert run(layout, _located, dtypes, env=aggregator.environment()) == [[want] * 3] * 3


def _refusals():
    with pytest.raises(TypeError, match="complex64"):
        comm.minloc(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="places of shape"):
        comm.maxloc(torch.ones(2), torch.ones(3, dtype=torch.int64))
    empty, where = comm.minloc(torch.ones(0))
    assert empty.numel() == where.numel() == 0


def test_minloc_says_what_it_cannot_take():
    run([0, 0], _refusals)


def _course(steps, ranks):
    """What happens in which step: kind and root; the same on all ranks."""
    draw = np.random.default_rng(7)
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier", "product"]
    return [(kinds[draw.integers(len(kinds))], int(draw.integers(ranks))) for _ in range(steps)]


def _check_sum(state):
    return float((state * np.arange(1, len(state) + 1)).sum())


def _expected(steps, numel, ranks):
    """The training below, without any communication. Integers in floats: the order of additions plays no part."""
    states = [np.arange(numel, dtype=np.float64) % 13 + r for r in range(ranks)]
    sums = [[] for _ in range(ranks)]
    for kind, root in _course(steps, ranks):
        total = sum(states)
        if kind == "all_reduce":
            states = [total] * ranks
        elif kind == "all_gather":
            states = [sum(state * (r + 1) for r, state in enumerate(states))] * ranks
        elif kind == "reduce_scatter":
            states = [total + ranks * r for r in range(ranks)]
        elif kind == "broadcast":
            states = [states[root]] * ranks
        elif kind == "reduce":
            states[root] = total
        states = [(state + r) % 1009 for r, state in enumerate(states)]
        for of_rank, state in zip(sums, states, strict=True):
            of_rank.append(_check_sum(state))
    return sums


def _training(steps, numel, pause_s, mark):
    """All kinds, in place where they can be, on a state that is never the same on all ranks."""
    me, n = dist.get_rank(), dist.get_world_size()
    state = torch.arange(numel, dtype=torch.float64) % 13 + me
    sums = []
    for step, (kind, root) in enumerate(_course(steps, n)):
        if me == 0:
            Path(mark + ".draft").write_text(str(step))
            os.replace(mark + ".draft", mark)
        if kind == "all_reduce":
            dist.all_reduce(state)
        elif kind == "all_gather":
            parts = [torch.zeros(numel, dtype=torch.float64) for _ in range(n)]
            dist.all_gather(parts, state)
            state = sum(part * (r + 1) for r, part in enumerate(parts))
        elif kind == "reduce_scatter":
            output = torch.zeros(numel, dtype=torch.float64)
            dist.reduce_scatter(output, [state + r for r in range(n)])
            state = output
        elif kind == "broadcast":
            dist.broadcast(state, root)
        elif kind == "reduce":
            dist.reduce(state, root)
        elif kind == "barrier":
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1), ReduceOp.PRODUCT)
        state = (state + me) % 1009
        sums.append(_check_sum(state.numpy()))
        away = _stats().failures > _stats().returns
        time.sleep(pause_s * (5 if away else 1))  # however long a busy machine takes to start the aggregator again
    return sums, _stats()


def _disturbed(tmp_path, aggregator, disturb, steps, numel=20_000, pause_s=0.0, **variables):
    """Trains while something happens to the aggregator; every step's state must be what it is without."""
    mark = tmp_path / "step"
    thread = Thread(target=disturb, args=(mark,), daemon=True)
    thread.start()
    got = run([0, 1, 2], _training, steps, numel, pause_s, str(mark), env=aggregator.environment(**variables))
    thread.join(deadline(30))
    for (sums, stats), want in zip(got, _expected(steps, numel, 3), strict=True):
        assert sums == want, stats
        assert stats.served + stats.elsewhere + stats.repeated + stats.received == steps
    return [stats for _, stats in got]


def _wait_for(mark, step):
    deadline_s = time.monotonic() + deadline(40)
    while not (mark.exists() and int(mark.read_text()) >= step):
        assert time.monotonic() < deadline_s, f"step {step} was never reached"
        time.sleep(0.002)


@pytest.mark.long
def test_an_aggregator_that_is_killed_and_restarted_changes_no_result(tmp_path, aggregator):
    def disturb(mark):
        for step in (10, 60, 110):
            _wait_for(mark, step)
            aggregator.kill()
            time.sleep(0.2)
            aggregator.start()

    stats = _disturbed(tmp_path, aggregator, disturb, steps=200, pause_s=0.02)
    for one in stats:
        assert one.failures >= 1, stats
        assert one.returns >= 1, stats
        assert one.served > 10, stats
    assert sum(one.repeated + one.received for one in stats) >= 3


@pytest.mark.long
def test_kills_at_any_moment_of_long_operations(tmp_path, aggregator):
    def disturb(mark):
        for number, step in enumerate((4, 24, 44, 64)):
            _wait_for(mark, step)
            time.sleep(0.005 * number)
            aggregator.kill()
            aggregator.start()

    stats = _disturbed(tmp_path, aggregator, disturb, steps=90, numel=200_000)
    assert all(one.failures for one in stats), stats


@pytest.mark.long
def test_an_aggregator_that_stalls_is_left_and_found_again(tmp_path, aggregator):
    def disturb(mark):
        _wait_for(mark, 10)
        aggregator.process.send_signal(signal.SIGSTOP)
        time.sleep(min(deadline(2.5), 8.0))  # the ranks take at least 16 s for what is left meanwhile
        aggregator.process.send_signal(signal.SIGCONT)

    stats = _disturbed(tmp_path, aggregator, disturb, steps=120, pause_s=0.03)
    assert all(one.failures >= 1 and one.returns >= 1 for one in stats), stats


def _cut_off(victim, moment):
    """One rank loses its connection, and nothing else."""
    from hocket.comm.aggregated import _agreement

    (agreement,) = _agreement._agreements
    results = []
    for step in range(40):
        if step == moment and dist.get_rank() == victim:
            agreement._session.group.clients[0]._link.sock.shutdown(2)
        data = torch.full((5000,), float(dist.get_rank() + step))
        dist.all_reduce(data)
        results.append(float(data[-1]))
        time.sleep(0.05)
    return results == [3.0 + 3 * step for step in range(40)], _stats()


@pytest.mark.parametrize("victim", [0, 2])
def test_one_rank_that_loses_its_connection_takes_all_to_the_hosts_and_back(aggregator, victim):
    for right, stats in run([0, 1, 2], _cut_off, victim, 5, env=aggregator.environment()):
        assert right
        assert stats.failures == 1
        assert stats.returns == 1
        assert stats.served > 10


def _without():
    data = torch.ones(100)
    dist.all_reduce(data)
    return float(data[0]), _stats()


def test_an_aggregator_that_is_not_there_is_done_without(aggregator):
    aggregator.kill()
    for value, stats in run([0, 1], _without, env=aggregator.environment()):
        assert value == 2
        assert (stats.served, stats.elsewhere, stats.failures) == (0, 1, 0)
    aggregator.start()


def _mismatch():
    with pytest.raises(CollectiveMismatchError, match=r"rank 2 .* of 4004 bytes|of 4004 bytes.* rank 2"):
        dist.all_reduce(torch.ones(1000 + dist.get_rank() // 2))
    data = torch.ones(10)
    dist.all_reduce(data)
    return float(data[0])


def test_ranks_that_disagree_all_hear_it_and_the_group_goes_on(aggregator):
    assert run([0, 1, 2], _mismatch, env=aggregator.environment()) == [3.0] * 3


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [[0, 1, 2], [0, 0, 1, 1]], ids=["three hosts", "two hosts of two"])
def test_every_mismatch_is_an_error_on_all_ranks_and_the_group_stays_usable(aggregator, layout):
    for found in run(layout, _mismatches, (10, 70_001), env=aggregator.environment()):
        for case, numel, text, usable in found:
            assert usable, (case, numel)
            assert "rank 1 " in text or "rank 1:" in text, (case, numel, text)
            if layout == [0, 1, 2] and (case, numel) == ("operator", 10):  # later ones go through the hosts
                assert "rank 1 (host host1) " in text


def _late(folder):
    group = dist.new_group(timeout=timedelta(seconds=2))
    missing = None
    if dist.get_rank() != 1:
        with pytest.raises(CollectiveTimeoutError, match="still waits for rank 1") as error:
            dist.all_reduce(torch.ones(1000), group=group)
        missing = error.value.missing
        (folder / str(dist.get_rank())).touch()
    end_s = time.monotonic() + deadline(30)
    while len(list(folder.iterdir())) < 2 and time.monotonic() < end_s:  # all are there until all others have heard
        time.sleep(0.02)
    return missing


def test_a_rank_that_is_late_is_named(aggregator, tmp_path):
    (tmp_path / "heard").mkdir()
    found = run([0, 1, 2], _late, tmp_path / "heard", env=aggregator.environment())
    assert found == [(1,), None, (1,)]


class Relay:
    """Stands before an aggregator. Once it is cut, nothing comes through any more of what one rank says or is told."""

    def __init__(self, address, rank):
        self.cut = False
        self._label = f"rank {rank} (".encode()
        self._to = address.split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                up = socket.create_connection((self._to[0], int(self._to[1])))
                self._sockets += [down, up]
                labels = []
                Thread(target=self._pass_on, args=(down, up, labels), daemon=True).start()
                Thread(target=self._pass_on, args=(up, down, labels), daemon=True).start()

    def _pass_on(self, source, target, labels):
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if self._label in piece:
                    labels.append(True)
                if not (self.cut and labels):
                    target.sendall(piece)
            if not (self.cut and labels):
                target.shutdown(socket.SHUT_WR)

    def close(self):
        for one in self._sockets:
            one.close()


def _out_of_reach(flag):
    """Broadcast; rank 1 begins when the aggregator cannot hear it any more, and the others time out there."""
    me = int(os.environ["RANK"])
    os.environ["HOCKET_HOST"] = f"host{me}"
    if me == 1:
        os.environ["HOCKET_AGGREGATOR_STALL_S"] = "0.5"
    dist.init_process_group("hocket", timeout=timedelta(seconds=4))
    dist.barrier()
    if me == 1:
        Path(flag).touch()
        time.sleep(1)
    data = torch.full((100,), me + 10.0)
    try:
        dist.broadcast(data, 0)
    except CommError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return data.tolist()


@pytest.mark.long
def test_a_rank_that_the_aggregator_lost_takes_nothing_for_the_result_when_others_leave(aggregator, tmp_path):
    relay, flag = Relay(aggregator.address, 1), tmp_path / "cut"

    def watch():
        while not relay.cut:
            relay.cut = flag.exists()
            time.sleep(0.02)

    Thread(target=watch, daemon=True).start()
    environment = aggregator.environment(HOCKET_AGGREGATOR=relay.address, HOCKET_AGGREGATOR_STALL_S="60")
    try:
        found = run_ranks(_out_of_reach, 3, str(flag), backend=None, timeout_s=100, env=environment)
    finally:
        relay.cut = True
        relay.close()
    assert all(isinstance(one, str) for one in found), found
    assert "could not agree how to go on" in found[1]


def _thrice():
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))


def _dies():
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(CommError, match="rank 1"):
        _thrice()
    return time.monotonic() - begin_s


def test_a_rank_that_dies_is_named_at_once(aggregator):
    outcome = run([0, 1, 2], _dies, env=aggregator.environment(), expect_death={1})
    assert max(outcome[0], outcome[2]) < deadline(5.0)


def test_settings_that_cannot_be_used_are_refused_with_the_variable(aggregator, monkeypatch):
    from hocket.comm.aggregated._aggregation_settings import AggregationSettings

    monkeypatch.delenv("HOCKET_AGGREGATOR", raising=False)
    assert AggregationSettings.from_environment() is None
    monkeypatch.setenv("HOCKET_AGGREGATOR", "nowhere")
    monkeypatch.delenv("HOCKET_AGGREGATOR_TOKEN_FILE", raising=False)
    with pytest.raises(CommError, match="HOCKET_AGGREGATOR_TOKEN_FILE is not"):
        AggregationSettings.from_environment()
    monkeypatch.setenv("HOCKET_AGGREGATOR_TOKEN_FILE", str(aggregator.token_file))
    with pytest.raises(CommError, match="write HOST:PORT"):
        AggregationSettings.from_environment()
    aggregator.token_file.chmod(0o644)
    monkeypatch.setenv("HOCKET_AGGREGATOR", aggregator.address)
    with pytest.raises(CommError, match="chmod it to 600"):
        AggregationSettings.from_environment()
