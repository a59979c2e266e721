"""Ranks on several hosts (told apart by HOCKET_HOST): two levels, schedules between hosts, the same results."""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hocket import comm
from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from hocket.comm.engines import Gloo, _gloo, _sockets
from hocket.comm.group import _group, _hosts
from hocket.comm.scheduled import FlatFrames, TwoLevelFrames
from hocket.comm.transport import Membership
from hocket.profile import Recorder
from hocket.schedule import ScheduleError
from hocket.testing import deadline

from ..host_world import run
from .test_random_operations import programs

LAYOUTS = {
    "two hosts of two": [0, 0, 1, 1],
    "two hosts, ranks in turn": [0, 1, 0, 1],
    "three hosts of one": [0, 1, 2],
    "uneven": [0, 0, 1],
    "two hosts of three": [0, 0, 0, 1, 1, 1],
}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_random_programs_agree_with_numpy_on_any_layout(layout, seed):
    assert min(run(layout, programs, seed, 6)) > 10


def _paths():
    found = {}
    for name, action in {
        "small": lambda: dist.all_reduce(torch.ones(10)),
        "large": lambda: dist.all_reduce(torch.ones(500_001)),
        "broadcast": lambda: dist.broadcast(torch.ones(10), 1),
        "barrier": dist.barrier,
    }.items():
        with Recorder() as recorder:
            action()
        (found[name],) = recorder.paths()
    return found


def test_ranks_of_one_host_use_shared_memory_and_hosts_use_schedules():
    for paths in run([0, 0, 1, 1], _paths):
        assert all(path.startswith("shm + ") for path in paths.values()), paths
        assert paths["large"] != "shm + leaders"
    for paths in run([0, 1, 2], _paths):
        assert paths["large"].startswith("gloo "), paths
        assert paths["small"] == paths["barrier"] == "tcp one_shot", paths  # frames alone, between two processes
    for paths in run([0, 0, 0], _paths):
        assert "gloo" not in str(paths)


def _chosen():
    comm.choose("all_reduce <64KiB one_shot; all_reduce >=64KiB ring rings=2")
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(16))
        data = torch.ones(1_000_003)
        dist.all_reduce(data)
        assert (data == 3).all()
    return recorder.paths()


def test_one_line_overrides_the_table():
    assert run([0, 1, 2], _chosen) == [{"gloo one_shot": 1, "gloo ring": 1}] * 3


def _path_of_one():
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(16))
    return recorder.paths()


def test_the_environment_overrides_it_too(tmp_path):
    layout = [0, 1, 2]
    setting = {"HOCKET_CHOICES": "all_reduce * double_tree pieces=2"}
    assert run(layout, _path_of_one, env=setting) == [{"gloo double_tree": 1}] * 3


def test_a_table_that_is_not_understood_is_refused_at_once():
    with pytest.raises(ScheduleError, match="all_reduce >=64KiB rong"):
        comm.choose("all_reduce >=64KiB rong")
    with pytest.raises(ScheduleError, match=r"absent\.toml' cannot be read"):
        comm.choose("absent.toml")


def _same_bits():
    results = []
    for numel in (7, 5000, 300_001):
        torch.manual_seed(dist.get_rank())
        data = torch.randn(numel)
        exact = data.double()
        dist.all_reduce(data)
        dist.all_reduce(exact)
        assert torch.allclose(data.double(), exact, rtol=1e-5, atol=1e-6)
        results.append(data)
        average = torch.full((numel,), float(dist.get_rank()))
        dist.all_reduce(average, ReduceOp.AVG)
        assert torch.equal(average, torch.full((numel,), (dist.get_world_size() - 1) / 2))
    return results


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ranks_have_the_same_bits(layout):
    first, *others = run(layout, _same_bits)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _negated():
    """The imaginary part of a conjugate, whose memory holds its negative."""
    tensor = torch.complex(torch.tensor(1.0), torch.tensor(2.0)).conj().imag
    assert tensor.is_neg()
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("layout", [[0, 1], [0, 0]], ids=["two hosts", "one host"])
def test_what_a_tensor_means_is_summed_not_its_memory(layout):
    assert run(layout, _negated) == [-4.0] * 2


def _mismatch(case, numel):
    """Rank 1 differs; then all do the same again."""
    me = dist.get_rank()
    odd = me == 1
    data = torch.ones(numel)
    try:
        if case == "operator":
            dist.all_reduce(data, ReduceOp.MAX if odd else ReduceOp.SUM)
        elif case == "kind":
            dist.broadcast(data, 0) if odd else dist.all_reduce(data)
        elif case == "dtype":
            dist.all_reduce(data.double() if odd else data)
        elif case == "shape":
            dist.all_reduce(torch.ones(3 * numel + 1) if odd else data)
        elif case == "gathered":
            n = dist.get_world_size()
            tail = odd * 3
            dist.all_gather([torch.ones(numel + tail) for _ in range(n)], torch.ones(numel + tail))
        elif case == "scattered":
            op = ReduceOp.MAX if odd else ReduceOp.SUM
            dist.reduce_scatter(data, [torch.full((numel,), 2.0)] * dist.get_world_size(), op)
        elif case == "root":
            dist.broadcast(data, int(odd))
        elif case == "order":
            calls = [lambda: dist.all_reduce(data), dist.barrier]
            for call in reversed(calls) if odd else calls:
                call()
        elif case == "splits":
            n = dist.get_world_size()
            sizes = [2 if odd and r == 0 else 1 for r in range(n)]
            dist.all_to_all_single(torch.ones(n), torch.ones(sum(sizes)), [1] * n, sizes)
        text = "no error"
    except CollectiveMismatchError as error:
        text = str(error)
    if case != "order":  # what others have begun to send has not come into it, and does not come later
        assert (data == 1).all(), case
    if case == "order":  # the other operation of each differs, too
        with pytest.raises(CollectiveMismatchError):
            dist.barrier() if me != 1 else dist.all_reduce(data)
    after = torch.ones(numel)
    dist.all_reduce(after)
    parts = [torch.empty(numel) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.full((numel,), float(me)))
    usable = (after == dist.get_world_size()).all() and all((part == r).all() for r, part in enumerate(parts))
    return text, bool(usable and (case == "order" or (data == 1).all()))


def _mismatches(numels):
    cases = ("operator", "kind", "dtype", "shape", "gathered", "scattered", "root", "order", "splits")
    return [(case, numel, *_mismatch(case, numel)) for numel in numels for case in cases]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("numels", [(10, 70_001), pytest.param((1, 500, 513, 8193, 2_000_000), marks=pytest.mark.long)])
def test_a_mismatch_is_an_error_on_all_ranks_of_all_hosts_and_the_group_stays_usable(layout, numels):
    if numels[0] == 10 and layout not in ([0, 1, 2], [0, 1, 0, 1]):
        pytest.skip("a sample in make test")
    for found in run(layout, _mismatches, numels):
        for case, numel, text, usable in found:
            assert usable, (case, numel)
            if case == "splits":
                assert "sends 2 elements to rank 0, which expects 1" in text, text
                continue
            assert "disagree at operation #" in text, (case, numel, text)
            assert "rank 1:" in text, text


def _messages():
    """Rank 1 sends what rank 0 may or may not expect; what rank 0 is told."""
    me, found = dist.get_rank(), {}
    cases = {
        "length": (torch.ones(5), torch.zeros(6)),
        "long length": (torch.ones(70_001), torch.zeros(60_000)),
        "short for long": (torch.ones(5), torch.zeros(60_000)),
        "long for short": (torch.ones(60_000), torch.zeros(5)),
        "type": (torch.ones(5, dtype=torch.int32), torch.zeros(5)),
        "long type": (torch.ones(30_000, dtype=torch.float64), torch.zeros(60_000)),
    }
    for name, (sent, place) in cases.items():
        if me == 1:
            dist.send(sent, 0)
        elif me == 0:
            with pytest.raises(CollectiveMismatchError) as caught:
                dist.recv(place, 1)
            assert not place.any(), name
            found[name] = str(caught.value)
        for numel in (3, 60_000):  # the next ones with that tag arrive, and nothing comes into what was refused
            data = torch.full((numel,), 2.0)
            if me == 1:
                dist.send(data, 0)
            elif me == 0:
                dist.recv(data.zero_(), 1)
                assert (data == 2).all(), name
                assert not place.any(), name
    # Many under way, tags out of order, from anyone, into strides.
    works = []
    parts = [torch.full((numel, 2), float(numel)) for numel in (4, 5000, 3, 9000)]
    if me == 1:
        works = [dist.isend(part, 0, tag=tag) for tag, part in enumerate(parts)]
    elif me == 0:
        places = [torch.zeros(2, *part.shape[:1]).t() for part in parts]
        works = [dist.irecv(places[tag], 1, tag=tag) for tag in (3, 1, 0, 2)]
    for work in works:
        work.wait()
    if me == 0:
        assert all(torch.equal(place, part) for place, part in zip(places, parts, strict=True))
        for numel in (7, 20_000):
            data = [torch.zeros(numel) for _ in range(2)]
            sources = [dist.recv(data[0], tag=9), dist.recv(data[1], 1 if numel == 7 else None, tag=9)]
            assert sources == [1, 1]
            assert [int(part[0]) for part in data] == [numel, numel + 1]
    elif me == 1:
        for numel in (7, 20_000):
            dist.send(torch.full((numel,), float(numel)), 0, tag=9)
            dist.send(torch.full((numel,), numel + 1.0), 0, tag=9)
    dist.barrier()
    return found


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1], [0, 0]], ids=["two hosts", "two hosts of two", "one host"])
def test_messages_between_two_ranks_are_compared(layout):
    first, *others = run(layout, _messages)
    assert not any(others)
    for name, text in first.items():
        assert "recv from rank 1 of" in text, (name, text)
        assert "rank 1 sent" in text, (name, text)
        assert "type" not in name or ("int32" in text or "float64" in text), text


def _message_from_nobody():
    if dist.get_rank():
        return time.sleep(3)
    begin_s = time.monotonic()
    with pytest.raises(CommError) as caught:
        dist.recv(torch.zeros(5), 1, tag=3)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begin_s


def test_a_message_that_does_not_come_names_its_sender():
    name, text, seconds = run([0, 1], _message_from_nobody, env={"HOCKET_TIMEOUT": "1"})[0]
    assert name == "CollectiveTimeoutError"
    assert "recv from rank 1 of 5 x float32 with tag 3 in group '0' passed its timeout of 1 s on rank 0" in text
    assert "rank 1 (host host1) has not sent it, or the network between them stalls" in text
    assert seconds < deadline(2.5)


def _one_gives_up():
    tensor = torch.zeros(2**20)
    if dist.get_rank() == 1:
        with pytest.raises(CollectiveTimeoutError):
            dist.irecv(tensor, 0).wait(timedelta(seconds=1))
        text = ""
    else:
        with pytest.raises(CollectiveTimeoutError) as caught:  # not a death: it lives
            dist.recv(tensor, 1)
        text = str(caught.value)
    dist.distributed_c10d._get_default_store().set(f"heard/{dist.get_rank()}", "")
    dist.distributed_c10d._get_default_store().wait(["heard/0", "heard/1"])
    return text


def test_a_connection_that_ends_since_the_peer_gave_up_names_its_time_out() -> None:
    text, _ = run([0, 1], _one_gives_up)
    assert text.startswith("rank 1 (host host1) failed in recv from rank 1 of 1048576 x float32")
    assert "as rank 0 (host host0) heard: recv from rank 0" in text
    assert "passed its timeout of 1 s on rank 1 (host host1)" in text


def _one_goes(how, numel):
    """Rank 1 dies or stops; what the others are told, and when."""
    data = torch.ones(numel)
    dist.all_reduce(data)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    begin_s = time.monotonic()
    try:
        for _ in range(3):
            dist.all_reduce(data)
    except CommError as error:
        return type(error).__name__, str(error), getattr(error, "culprits", ()), time.monotonic() - begin_s


@pytest.mark.long
@pytest.mark.parametrize("how", ["dies", "stops"])
@pytest.mark.parametrize(
    ("layout", "numel"),
    [
        pytest.param([0, 1, 2], 10, marks=pytest.mark.long),
        pytest.param([0, 1, 2, 3], 300_001, marks=pytest.mark.long),
        ([0, 0, 1, 1], 10),
        pytest.param([0, 0, 1, 1], 300_001, marks=pytest.mark.long),
        pytest.param([0, 1, 0, 1], 10, marks=pytest.mark.long),
        pytest.param([0, 0, 1], 300_001, marks=pytest.mark.long),
    ],
)
def test_between_hosts_too_the_rank_at_fault_is_named(how, layout, numel):
    seconds = {"env": {"HOCKET_TIMEOUT": "4"}} if how == "stops" else {}
    found = run(layout, _one_goes, how, numel, expect_death={1}, allow_late={1}, **seconds)
    for rank, result in enumerate(found):
        if rank == 1:
            continue
        name, text, culprits, seconds = result
        assert name == ("PeerDiedError" if how == "dies" else "CollectiveTimeoutError"), text
        assert culprits == (1,), text
        assert "rank 1" in text
        assert seconds < deadline(9.0 if how == "stops" else 1.5)
        if layout == [0, 1, 2]:
            assert "rank 1 (host host1)" in text
            assert "all_reduce #2 of group '0'" in text


def _split_in_a_large_group():
    """As in a group whose lengths do not fit into a frame."""
    dist.all_reduce(torch.ones(1))  # the group is made when it is first used
    frames = [one for one in gc.get_objects() if isinstance(one, FlatFrames | TwoLevelFrames)]
    assert frames
    for one in frames:
        one.most_nbytes = 8
    first, second = _mismatch("splits", 10), "no error"
    n, me = dist.get_world_size(), dist.get_rank()
    got, sent = torch.zeros(n), torch.arange(n, dtype=torch.float32) + n * me
    try:
        dist.all_to_all_single(got, sent)
    except CommError as error:
        second = str(error)
    return *first, second, got.tolist()


@pytest.mark.parametrize("layout", [[0, 1, 2], [0, 0, 1, 1]])
def test_splits_are_compared_in_groups_of_any_size(layout):
    n = len(layout)
    for rank, (text, usable, again, got) in enumerate(run(layout, _split_in_a_large_group)):
        assert "sends 2 elements to rank 0, which expects 1" in text
        assert usable
        assert again == "no error"
        assert got == [rank + n * other for other in range(n)]


def _one_dies_before_a_group_is_made():
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    try:
        dist.new_group([0, 1, 2, 3])
    except PeerDiedError as error:
        return error.culprits, time.monotonic() - begin_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_who_dies_before_it_comes_to_make_a_group_is_named_within_seconds(layout):
    found = run(layout, _one_dies_before_a_group_is_made, expect_death={3}, env={"HOCKET_TIMEOUT": "60"})
    for culprits, waited_s in found[:3]:
        assert culprits == (3,)
        assert waited_s < deadline(10)


def _one_dies_while_a_group_is_made(victim):
    if dist.get_rank() == victim:
        end = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        mock.patch.object(_group, "open_transport", end).start()
    begin_s = time.monotonic()
    try:
        dist.new_group([0, 1, 2, 3])
    except PeerDiedError as error:
        return error.culprits, time.monotonic() - begin_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_who_dies_while_a_group_is_made_is_named_within_seconds(layout):
    found = run(layout, _one_dies_while_a_group_is_made, 3, expect_death={3}, env={"HOCKET_TIMEOUT": "60"})
    for culprits, waited_s in found[:3]:
        assert culprits == (3,)
        assert waited_s < deadline(10)


def _one_s_connections_break(what):
    """Rank 1 dies; rank 0 learns of it in what it does first, after the engine has heard of it."""
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    data = torch.ones(300_001)
    does = {
        "send": lambda: dist.send(data, 1),
        "recv": lambda: dist.recv(data, 1),
        "recv from any rank": lambda: dist.recv(data),
        "reduce_scatter": lambda: dist.reduce_scatter(data, [torch.ones(300_001)] * 2),
    }
    with pytest.raises(PeerDiedError) as caught:
        does[what]()
    return caught.value.culprits, str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["send", "recv", "recv from any rank", "reduce_scatter"])
def test_a_connection_that_has_broken_before_is_a_death_too(what):
    culprits, text = run([0, 1], _one_s_connections_break, what, expect_death={1})[0]
    assert culprits == (1,)
    assert "rank 1 (host host1) died or left while rank 0 (host host0) waited in" in text


def _one_dies_in_the_middle_of_a_message():
    """Rank 0 kills rank 1 when the first bytes have come; the connection to rank 2 has ended before."""
    processes = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(processes, torch.tensor([os.getpid()]))
    if dist.get_rank() == 2:
        return None
    if dist.get_rank() == 1:
        return dist.send(torch.ones(2**25), 0)
    time.sleep(0.5)
    data = torch.zeros(2**25)
    work = dist.irecv(data, 1)
    while not data[0]:
        time.sleep(1e-4)
    os.kill(int(processes[1]), signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(PeerDiedError) as caught:
        work.wait()
    return caught.value.culprits, time.monotonic() - begin_s, bool(data[-1])


@pytest.mark.long
def test_who_dies_in_the_middle_of_a_message_is_named_within_seconds():
    found = run([0, 1, 2], _one_dies_in_the_middle_of_a_message, expect_death={1}, env={"HOCKET_TIMEOUT": "30"})
    culprits, waited_s, whole = found[0]
    assert culprits == (1,)
    assert not whole, "it was the middle"
    assert waited_s < deadline(5)


def _all_others_die():
    dist.barrier()
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(PeerDiedError):
        dist.recv(torch.ones(5))
    return time.monotonic() - begin_s


def test_who_waits_for_any_rank_hears_that_none_is_left_of_hosts_of_several():
    waited_s = run([0, 0, 1, 1], _all_others_die, expect_death={1, 2, 3}, env={"HOCKET_TIMEOUT": "60"})[0]
    assert waited_s < deadline(10)


def _one_makes_a_group_alone():
    dist.barrier()
    try:
        if dist.get_rank():
            dist.new_group([0, 1])
        else:
            dist.barrier()
    except CollectiveTimeoutError as error:
        sys.last_value = error  # it ends the program
        return error.culprits, str(error)


@pytest.mark.long
def test_who_waits_for_a_rank_that_waits_for_it_elsewhere_hears_of_that():
    (first, said), (second, _) = run([0, 1], _one_makes_a_group_alone, env={"HOCKET_TIMEOUT": "3"})
    assert (first, second) == ((1,), (0,))
    assert "rank 1" in said


def test_a_store_of_the_programs_own_that_cannot_be_cloned_hinders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_late() -> int:
        time.sleep(0.6)
        return 7

    monkeypatch.setattr(_hosts, "_PATIENCE", timedelta(0))
    at = Membership(object(), "own", 0, 1, timedelta(seconds=20), [0])
    assert _hosts.while_all_live(made_late, at, {}, None) == 7


def test_who_cannot_connect_is_told_to_all_and_who_hears_nothing_waits_no_longer_than_its_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(_hosts, "_PATIENCE", timedelta(0))
    monkeypatch.setattr(_hosts, "_GRACE_S", 0.0)
    store, alone = dist.HashStore(), threading.Event().wait

    def make(work, store, *, rank: int, timeout: timedelta) -> None:
        _hosts.while_all_live(work, Membership(store, "own", rank, 2, timeout, [0, 1]), {}, None)

    first = "rank 0 cannot make group 'own': Connection refused"
    with pytest.raises(CommError, match=f"^{first}"):
        make(refused, store, rank=0, timeout=timedelta(seconds=20))
    with pytest.raises(CommError, match=f"^rank 1 cannot make group 'own', since {first}"):
        make(alone, store, rank=1, timeout=timedelta(seconds=20))
    with pytest.raises(CommError, match="^rank 1 cannot make group 'own': after . s not all ranks are connected"):
        make(alone, dist.HashStore(), rank=1, timeout=timedelta(seconds=0.3))


def test_who_waits_for_a_host_that_does_not_answer_names_it_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_hosts, "_PATIENCE", timedelta(0))
    monkeypatch.setattr(_hosts, "_UNANSWERED_S", 0.2)
    at = Membership(dist.HashStore(), "own", 0, 2, timedelta(seconds=deadline(20)), [0, 1])
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as opened:
        address = server.getsockname()
        for _ in range(3):  # who listens takes the first, and drops the last as a firewall does
            opened.enter_context(one := socket.socket()).setblocking(False)
            one.connect_ex(address)
        begin_s = time.monotonic()

        def until_said() -> None:
            while not caplog.messages and time.monotonic() < begin_s + deadline(15):
                time.sleep(0.1)

        _hosts.while_all_live(until_said, at, {}, None)
        named = f"no answer from 127.0.0.1, port {address[1]}; if that is a host of this job, a firewall may be between"
        assert [message.partition(". Hosts")[0] for message in caplog.messages] == [
            f"hocket: rank 0 waits to make group 'own': {named}"
        ]
        with pytest.raises(CommError, match=f"not all ranks are connected; {named}.*GLOO_SOCKET_IFNAME"):
            _hosts.while_all_live(threading.Event().wait, at._replace(timeout=timedelta(seconds=0.1)), {}, None)


def test_who_only_listens_says_at_its_time_out_where_nobody_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hosts, "_PATIENCE", timedelta(0))
    for module in (_gloo, _sockets):
        monkeypatch.setattr(module, "is_loopback", lambda address: False)
    store = dist.HashStore()
    gloo = Gloo(store, 0, 2, timedelta(seconds=deadline(5)))
    gloo.loopback = True
    at = Membership(store, "own", 0, 2, timedelta(seconds=1), [0, 1])
    unheard = r"not all ranks are connected; nobody has connected to 127\.0\.0\.1, port (\d+), .*GLOO_SOCKET_IFNAME"
    with pytest.raises(CommError, match=unheard) as raised:
        _hosts.while_all_live(gloo.connect, at, {}, None)
    port = int(str(raised.value).partition("port ")[2].partition(",")[0])
    with (
        socket.create_connection(("127.0.0.1", port)),
        pytest.raises(CommError, match="not all ranks are connected; others may say why"),
    ):
        _hosts.while_all_live(threading.Event().wait, at, {}, None)
