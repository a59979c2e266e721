"""Which operation is repeated, when an aggregator fails some ranks before and some after they have its result."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from hocket.aggregator import AggregatorLostError, FailCode, GroupFailedError, Kind
from hocket.comm import CollectiveTimeoutError, CommError
from hocket.comm.aggregated._aggregated import AggregatedTransport
from hocket.comm.aggregated._tree_position import tree_position
from hocket.comm.transport._reduce import reducer
from hocket.testing import deadline

N = 3
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier", "all_to_all"]
COMMITTED = {Kind.REDUCE, Kind.BROADCAST, Kind.REDUCE_SCATTER}
SUM = reducer(ReduceOp.SUM, torch.int64)


class Meeting:
    """Ranks on threads exchange what they bring; it fails if they come for different things."""

    def __init__(self):
        self._barrier = threading.Barrier(N, timeout=deadline(10))
        self._brought = [None] * N
        self._left = []

    def all(self, rank, what, value):
        self._brought[rank] = what, value
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        assert len({one for one, _ in found}) == 1, found
        return [one for _, one in found]

    def leave(self, rank):
        """When all others have gone, who waits is told so, and not only when its time is over."""
        self._left.append(rank)
        if len(self._left) == N - 1:
            self._barrier.abort()


class Hosts:
    """The host-based transport, in one process."""

    def __init__(self, meeting, rank):
        self._meeting, self._rank = meeting, rank

    def _all(self, what, value):
        return self._meeting.all(self._rank, what, value.clone())

    def all_reduce(self, flat, op, timeout_s):
        flat.copy_(sum(self._all("all_reduce", flat)))
        return "hosts"

    def reduce(self, flat, op, root, timeout_s):
        total = sum(self._all(f"reduce {root}", flat))
        if self._rank == root:
            flat.copy_(total)
        return "hosts"

    def broadcast(self, flat, root, timeout_s):
        flat.copy_(self._all(f"broadcast {root} {flat.numel()}", flat)[root])
        return "hosts"

    def all_gather(self, outputs, flat, timeout_s):
        for output, one in zip(outputs, self._all(f"all_gather {flat.numel()}", flat), strict=True):
            output.copy_(one)
        return "hosts"

    def reduce_scatter(self, output, inputs, op, timeout_s):
        output.copy_(sum(one[self._rank] for one in self._all("reduce_scatter", torch.stack(list(inputs)))))
        return "hosts"

    def all_to_all(self, outputs, inputs, timeout_s):
        for output, one in zip(outputs, self._all("all_to_all", torch.stack(list(inputs))), strict=True):
            output.copy_(one[self._rank])
        return "hosts"

    def barrier(self, timeout_s):
        self._all("barrier", torch.zeros(1))
        return "hosts"

    def close(self, timeout_s):
        pass


class Aggregator:
    """Serves operations until the one at which it fails all ranks but those that have their result already.

    Args:
        fails_at: operations that it serves without trouble, one number for each life.
        finished: for each life the ranks for which its last operation is over before they hear of the end.
        partly: whether the others have a part of the result in their memory by then.
    """

    def __init__(self, fails_at, finished, partly):
        self.meeting = Meeting()
        self.fails_at, self.finished, self.partly = fails_at, finished, partly


class AggregationSession:
    def __init__(self, aggregator, rank):
        self._aggregator, self._rank = aggregator, rank
        self.position = tree_position(["here"] * N, rank)
        self._life = 0
        self._served = 0
        self.broken = False
        self.lost = 0

    @property
    def ready(self):
        return 0 if self.broken else self._life + 1

    @property
    def group(self):
        return self

    def begin(self, timeout_s):
        pass

    def close(self):
        pass

    def lose(self):
        """Comes back at once, as the next incarnation."""
        self.lost += 1
        self.broken = False
        self._life += 1
        self._served = 0

    def post(self, kind, send, receive, *, operator, element, root, timeout_s):
        return Work(self, kind, send, receive, root)

    def serve(self, work, kind, send, receive, root):
        aggregator, life = self._aggregator, self._life
        self._served += 1
        if self.broken:
            raise AggregatorLostError("it has been gone for long")
        last = life < len(aggregator.fails_at) and self._served > aggregator.fails_at[life]
        finished = aggregator.finished[life] if last else frozenset(range(N))
        if not last or finished or aggregator.partly:
            sent = None if send is None else torch.from_numpy(send.copy()).view(torch.int64)
            everyone = aggregator.meeting.all(self._rank, (life, kind, root), sent)
        mine = self._rank in finished
        if mine or (last and (aggregator.partly or (finished and kind in COMMITTED))):
            whole = mine or (finished and kind in COMMITTED)
            self._deliver(kind, everyone, receive, root, whole)
        if last:
            self.broken = True  # a rank that has finished finds out at its next operation
            if not mine:
                work.may_be_over = bool(finished)
                raise AggregatorLostError("it is gone")

    def _deliver(self, kind, everyone, receive, root, whole):
        if receive is None or kind == Kind.BARRIER:
            return
        target = torch.from_numpy(receive).view(torch.int64)
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE):
            result = sum(everyone)
        elif kind == Kind.BROADCAST:
            result = everyone[root]
        elif kind == Kind.REDUCE_SCATTER:
            result = sum(everyone).view(N, -1)[self._rank]
        else:
            result = torch.cat(everyone)
            numel = everyone[0].numel()
            result[self._rank * numel : (self._rank + 1) * numel] = -1  # its own part does not come back
        end = len(target) if whole else len(target) // 2
        target[:end] = result[:end]


class Work:
    def __init__(self, session, *what):
        self._session, self._what = session, what
        self.may_be_over = False

    def wait(self):
        self._session.serve(self, *self._what)


class Waits:
    """What becomes of an operation at the aggregator that lasts too long: an error, after part of the result has come.

    The aggregator says that it waits for `late`; who cannot reach it any more, as `cut_off` cannot, finds out alone.
    """

    def __init__(self, session, rank, late, cut_off, receive):
        self._session, self._rank, self._late, self._cut_off = session, rank, late, cut_off
        self._receive = receive
        self.may_be_over = False

    def wait(self):
        if self._receive is not None:
            self._receive[: len(self._receive) // 2] = 7
        self._session.broken = True
        if self._rank in self._cut_off:
            raise AggregatorLostError("it has not answered")
        raise GroupFailedError("it still waits for rank", FailCode.TIMEOUT, self._late, 1)


def _operate(transport, rank, kind, root, state):
    """Do one operation, and return the state after it."""
    if kind == "all_reduce":
        transport.all_reduce(state, SUM, 10)
    elif kind == "reduce":
        transport.reduce(state, SUM, root, 10)
    elif kind == "broadcast":
        transport.broadcast(state, root, 10)
    elif kind == "all_gather":
        outputs = [torch.zeros_like(state) for _ in range(N)]
        transport.all_gather(outputs, state, 10)
        return sum((r + 2) * output for r, output in enumerate(outputs))
    elif kind == "reduce_scatter":
        output = torch.zeros_like(state)
        transport.reduce_scatter(output, [state + 5 * r for r in range(N)], SUM, 10)
        return output
    elif kind == "all_to_all":
        outputs = [torch.zeros_like(state) for _ in range(N)]
        transport.all_to_all(outputs, [state + 3 * r for r in range(N)], 10)
        return sum((r + 1) * output for r, output in enumerate(outputs))
    else:
        transport.barrier(10)
    return state


def _course(transport, rank, steps, numel):
    """Does the operations, changing the state between them; returns all states."""
    state = torch.arange(numel) * (rank + 1)
    states = []
    for number, (kind, root) in enumerate(steps):
        state = _operate(transport, rank, kind, root, state)
        states.append(state.tolist())
        state = (state * (rank + 2) + number) % 10007
    transport.close(10)
    return states


def _play(steps, fails_at, finished, partly, numel=6, watched=False):
    with ThreadPoolExecutor(2 * N) as pool:
        plain = Meeting()
        want = list(pool.map(lambda r: _course(Hosts(plain, r), r, steps, numel), range(N)))
        aggregator, hosts, meeting = Aggregator(fails_at, finished, partly), Meeting(), Meeting()

        def one(rank):
            session, beside = AggregationSession(aggregator, rank), Hosts(meeting, rank) if watched else None
            transport = AggregatedTransport(session, Hosts(hosts, rank), rank, N, "test", 10, beside)
            return _course(transport, rank, steps, numel), transport.agreement.stats

        got = list(pool.map(one, range(N)))
    assert [states for states, _ in got] == want
    for _, stats in got:
        assert stats.served + stats.elsewhere + stats.repeated + stats.received == len(steps)
    return [stats for _, stats in got]


subsets = st.sets(st.integers(0, N - 1)).map(frozenset)
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, N - 1)), min_size=1, max_size=14)


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(steps, st.lists(st.tuples(st.integers(0, 4), subsets), max_size=3), st.booleans(), st.booleans())
def test_whoever_has_finished_when_it_fails_all_come_to_the_same_results(steps, lives, partly, watched):
    _play(steps, [fails for fails, _ in lives], [finished for _, finished in lives], partly, watched=watched)


def test_a_rank_that_is_behind_need_not_wait_for_the_next_operation_of_the_others():
    """As with several ranks on a host: before it the others wait for those that the rank behind keeps."""
    aggregator, hosts, meeting = Aggregator([0], [frozenset({0, 1})], True), Meeting(), Meeting()
    both = threading.Barrier(N, timeout=deadline(10))

    def one(rank):
        session = AggregationSession(aggregator, rank)
        transport = AggregatedTransport(session, Hosts(hosts, rank), rank, N, "test", 10, Hosts(meeting, rank))
        sums = []
        for number in range(4):
            state = torch.full((6,), number * 10 + rank)
            transport.all_reduce(state, SUM, 10)
            sums.append(int(state[0]))
            both.wait()
        transport.close(10)
        return sums

    with ThreadPoolExecutor(N) as pool:
        assert list(pool.map(one, range(N))) == [[30 * number + 3 for number in range(4)]] * N


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_result_that_one_rank_has_is_given_to_the_others_and_not_made_again(kind):
    stats = _play([(kind, 0)] * 4, [1], [frozenset({1})], True)
    assert [one.received for one in stats] == [1, 0, 1]
    assert sum(one.repeated for one in stats) == 1  # rank 1 hears of the end in the third operation


@pytest.mark.parametrize("kind", ["reduce", "broadcast", "reduce_scatter"])
def test_what_has_been_confirmed_by_all_is_over_for_those_who_have_not_heard_it(kind):
    stats = _play([(kind, 1)] * 4, [1], [frozenset({0, 2})], False)
    assert [one.received for one in stats] == [0, 1, 0]


def test_an_operation_that_nobody_has_finished_is_repeated_by_all_with_the_inputs_of_the_start():
    stats = _play([("all_reduce", 0)] * 3, [1], [frozenset()], True)
    assert [(one.served, one.repeated, one.returns) for one in stats] == [(2, 1, 1)] * N or [
        (one.repeated, one.failures) for one in stats
    ] == [(1, 1)] * N


def test_nobody_is_left_behind_when_the_next_operation_is_none_of_the_aggregators():
    stats = _play([("all_reduce", 0), ("all_to_all", 0), ("all_reduce", 0)], [0], [frozenset({0, 1})], True)
    assert [one.received for one in stats] == [0, 0, 1]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_an_operation_that_failed_on_one_rank_is_never_over_for_another(kind):
    """One rank is cut off from the aggregator, which then tells the others that it waits for that rank in vain.

    They fail, and leave; who leaves has not finished the operation, and has no result of it to give.
    """
    late, hosts = 1, Meeting()
    aggregator = Aggregator([], [], partly=False)

    def one(rank):
        session = AggregationSession(aggregator, rank)
        transport = AggregatedTransport(session, Hosts(hosts, rank), rank, N, "test", 10)
        state = torch.arange(6) + rank
        transport.all_reduce(state, SUM, 10)  # of the size of the results to come
        session.post = lambda kind, send, receive, **_: Waits(session, rank, late, {late}, receive)
        error = CommError if rank == late else CollectiveTimeoutError
        with pytest.raises(error) as found:
            _operate(transport, rank, kind, 0, state)
        if rank != late:
            hosts.leave(rank)
        transport.close(1)
        with pytest.raises(CommError, match="operation 2 failed"):
            _operate(transport, rank, kind, 0, state)
        return str(found.value)

    with ThreadPoolExecutor(N) as pool:
        texts = list(pool.map(one, range(N)))
    assert "could not agree" in texts[late]


def test_a_rank_whose_part_has_not_come_takes_nobodys_word_that_it_has():
    """As if another rank stood at the next operation by mistake: what is in memory would be taken for the result."""
    hosts = Meeting()
    aggregator = Aggregator([], [], partly=False)

    def one(rank):
        session = AggregationSession(aggregator, rank)
        transport = AggregatedTransport(session, Hosts(hosts, rank), rank, N, "test", 10)
        session.post = lambda kind, send, receive, **_: Waits(session, rank, 0, range(N), receive)
        if rank == 0:
            transport.agreement._number += 1
        try:
            return transport.broadcast(torch.arange(6), 0, 10)
        finally:
            hosts.leave(rank)

    with ThreadPoolExecutor(N) as pool:
        for done in [pool.submit(one, rank) for rank in (1, 2, 0)][:2]:
            with pytest.raises(CommError, match="has not come"):
                done.result()
