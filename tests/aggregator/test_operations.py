"""Every kind, operator and type against numpy, bit for bit, at one aggregator and in trees."""

import itertools

import numpy as np
import pytest

from hocket.aggregator import AggregationClient, AggregationError, ElementType, Kind, Limits, Operator, fold
from hocket.testing import deadline

from .world import TOKEN, LongWire, aggregators, members, members_of_tree

INTEGERS = [t for t in ElementType if "FLOAT" not in t.name]
FLOATS = [t for t in ElementType if "FLOAT" in t.name]
BITWISE = {Operator.BAND, Operator.BOR, Operator.BXOR}
LOCATING = {Operator.MINLOC, Operator.MAXLOC}
PAIRS = [
    (operator, element)
    for operator, element in itertools.product(list(Operator)[1:], ElementType)
    if not (operator in BITWISE and element in FLOATS)
]
NUMPY = {
    ElementType.FLOAT16: np.float16,
    ElementType.BFLOAT16: np.uint16,
    ElementType.FLOAT32: np.float32,
    ElementType.FLOAT64: np.float64,
}


def dtype_of(element):
    return np.dtype(NUMPY.get(element) or element.name.lower())


def contribution(operator, element, numel, seed):
    """Random elements as flat bytes, with the awkward ones among them."""
    draw = np.random.default_rng(seed)
    if element in INTEGERS:
        info = np.iinfo(dtype_of(element))
        values = draw.integers(info.min, info.max, numel, dtype=dtype_of(element), endpoint=True)
        values[:: max(1, numel // 7)] = 0
    else:
        wide = (draw.standard_normal(numel) * 10.0 ** draw.integers(-3, 4, numel)).astype(np.float32)
        wide[:: max(1, numel // 5)] = draw.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0])
        values = to_bfloat16(wide) if element == ElementType.BFLOAT16 else wide.astype(dtype_of(element))
    if operator not in LOCATING:
        return values.view(np.uint8)
    if element in INTEGERS:
        values %= 4  # so that there are ties
    pairs = np.zeros((numel, 2), dtype=np.int64)
    pairs[:, 0:1].view(dtype_of(element))[:, 0] = values
    pairs[:, 1] = draw.integers(0, 1000, numel)
    return pairs.reshape(-1).view(np.uint8)


def to_bfloat16(wide):
    """By the definition: the nearer of the two neighbours, of equally near ones that with an even last bit."""
    bits = wide.view(np.uint32).astype(np.uint64)
    low, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low % 2 == 1))
    return np.where(np.isnan(wide), 0x7FC0, low + up).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def reference(operator, element, parts):
    """What the documentation of `fold` says, element by element, written without it."""
    if operator in LOCATING:
        return locating_reference(operator, element, parts)
    columns = [part.view(dtype_of(element)) for part in parts]
    if element == ElementType.BFLOAT16:
        columns = [from_bfloat16(column) for column in columns]
    elif element == ElementType.FLOAT16 and operator == Operator.SUM:
        columns = [column.astype(np.float32) for column in columns]
    with np.errstate(all="ignore"):
        total = columns[0].copy()
        for column in columns[1:]:
            total = {
                Operator.SUM: lambda a, b: a + b,
                Operator.MIN: np.minimum,
                Operator.MAX: np.maximum,
                Operator.BAND: lambda a, b: a & b,
                Operator.BOR: lambda a, b: a | b,
                Operator.BXOR: lambda a, b: a ^ b,
                Operator.LAND: lambda a, b: ((a != 0) & (b != 0)).astype(a.dtype),
                Operator.LOR: lambda a, b: ((a != 0) | (b != 0)).astype(a.dtype),
                Operator.LXOR: lambda a, b: ((a != 0) ^ (b != 0)).astype(a.dtype),
            }[operator](total, column)
        if element == ElementType.BFLOAT16:
            total = to_bfloat16(total)
        elif total.dtype != dtype_of(element):
            total = total.astype(np.float16)
    return total.view(np.uint8)


def locating_reference(operator, element, parts):
    tables = [part.view(np.int64).reshape(-1, 2) for part in parts]
    result = tables[0].copy()
    columns = [table[:, 0:1].copy().view(dtype_of(element))[:, 0] for table in tables]
    shown = [from_bfloat16(c) if element == ElementType.BFLOAT16 else c for c in columns]
    for row in range(len(result)):
        candidates = [
            (values[row], int(table[row, 1]), table[row]) for values, table in zip(shown, tables, strict=True)
        ]
        nans = [c for c in candidates if c[0] != c[0]]
        if nans:
            result[row] = min(nans, key=lambda c: c[1])[2]
        else:
            extreme = (min if operator == Operator.MINLOC else max)(c[0] for c in candidates)
            result[row] = min((c for c in candidates if c[0] == extreme), key=lambda c: c[1])[2]
    return result.reshape(-1).view(np.uint8)


def same(operator, element, got, want):
    if operator not in LOCATING:
        return np.array_equal(got, want)
    width = dtype_of(element).itemsize
    got, want = got.reshape(-1, 16), want.reshape(-1, 16)
    return np.array_equal(got[:, :width], want[:, :width]) and np.array_equal(got[:, 8:], want[:, 8:])


def _all_reduces(group, numel, segment):
    works = []
    for number, (operator, element) in enumerate(PAIRS):
        given = contribution(operator, element, numel, 1000 * number + group.position)
        result = np.zeros_like(given)
        work = group.post(
            Kind.ALL_REDUCE, given, result, operator=operator, element=element, segment=segment, timeout_s=deadline(20)
        )
        works.append((work, given, result))
    for work, _, _ in works:
        work.wait()
    return [(given, result) for _, given, result in works]


@pytest.mark.parametrize(("numel", "segment"), [(1, None), (1003, 2048)])
def test_every_operator_of_every_type_is_the_reference_bit_for_bit(numel, segment):
    with aggregators() as server:
        results = members(server, 3, _all_reduces, numel, segment)
    assert len(PAIRS) == 9 * 12 - 3 * 4 + 2 * 12
    for number, (operator, element) in enumerate(PAIRS):
        want = reference(operator, element, [result[number][0] for result in results])
        for rank, result in enumerate(results):
            assert same(operator, element, result[number][1], want), (operator.name, element.name, rank)


def test_a_lone_member_gets_what_the_operator_makes_of_its_contribution():
    with aggregators() as server:
        (results,) = members(server, 1, _all_reduces, 40, None)
    for (operator, element), (given, result) in zip(PAIRS, results, strict=True):
        if operator in (Operator.LAND, Operator.LOR, Operator.LXOR):
            column = given.view(dtype_of(element))
            truth = (from_bfloat16(column) if element == ElementType.BFLOAT16 else column) != 0
            one = 0x3F80 if element == ElementType.BFLOAT16 else 1
            assert np.array_equal(result.view(dtype_of(element)), np.where(truth, one, 0).astype(column.dtype))
        else:
            assert same(operator, element, result, given)


def test_what_has_no_arithmetic_is_refused():
    for operator, element in itertools.product(BITWISE, FLOATS):
        with pytest.raises(ValueError, match=operator.name):
            fold(operator, element)


def _every_kind(group, numel):
    """Each kind once with every root, several at once; returns what this member holds afterwards."""
    me, total = group.position, group.total
    own = np.random.default_rng(me).standard_normal(numel * total)
    works, results = [], {}

    def post(name, kind, send, receive, **more):
        results[name] = receive
        sent = None if send is None else send.view(np.uint8)
        wanted = None if receive is None else receive.view(np.uint8)
        works.append(group.post(kind, sent, wanted, element=ElementType.FLOAT64, timeout_s=deadline(20), **more))

    summing = {"operator": Operator.SUM, "segment": 1024}
    post("all", Kind.ALL_REDUCE, own, np.zeros_like(own), **summing)
    post("scattered", Kind.REDUCE_SCATTER, own, np.zeros(numel), **summing)
    gathered = np.zeros_like(own)
    gathered[me * numel : (me + 1) * numel] = own[:numel]
    post("gathered", Kind.ALL_GATHER, own[:numel].copy(), gathered, segment=1024)
    for root in range(total):
        post(f"reduced {root}", Kind.REDUCE, own, np.zeros_like(own) if me == root else None, root=root, **summing)
        post(
            f"sent {root}",
            Kind.BROADCAST,
            own if me == root else None,
            None if me == root else np.zeros_like(own),
            root=root,
            segment=1024,
        )
        post(f"barrier {root}", Kind.BARRIER, None, None)
    for work in works:
        work.wait()
    return own, results


def _check_every_kind(outcome, numel, sum_of):
    given = [own for own, _ in outcome]
    total = len(given)
    want = sum_of(given)
    for me, (_, results) in enumerate(outcome):
        part = slice(me * numel, (me + 1) * numel)
        assert np.array_equal(results["all"], want)
        assert np.array_equal(results["scattered"], want[part])
        assert np.array_equal(results["gathered"], np.concatenate([one[:numel] for one in given]))
        for root in range(total):
            if me == root:
                assert np.array_equal(results[f"reduced {root}"], want)
            else:
                assert np.array_equal(results[f"sent {root}"], given[root])


@pytest.mark.parametrize("numel", [1, 333])
@pytest.mark.parametrize("total", [1, 2, 5])
def test_every_kind_with_every_root(total, numel):
    with aggregators() as server:
        outcome = members(server, total, _every_kind, numel)
        assert server.stats().groups_failed == 0
    _check_every_kind(outcome, numel, lambda given: sum(given[1:], start=given[0]))


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 1, 2)])
def test_a_tree_of_aggregators_sums_its_leaves_first(shape):
    def by_leaves(given):
        sums, at = [], 0
        for count in shape:
            part = given[at : at + count]
            sums.append(sum(part[1:], start=part[0]))
            at += count
        return sum(sums[1:], start=sums[0])

    with aggregators(1 + len(shape)) as servers:
        outcome = members_of_tree(servers, shape, _every_kind, 333)
        for server in servers:
            assert server.stats().operations["all_reduce"] == 1
    _check_every_kind(outcome, 333, by_leaves)


def test_a_far_root_with_one_child_gets_all_before_it_hears_that_all_have_it():
    limits = Limits(window_nbytes=1 << 14, segment_nbytes=1 << 12)
    data = np.arange(5 << 12, dtype=np.uint8)  # more than one window, so that the leaf waits for the root's credits

    def broadcast(group):
        receive = np.zeros_like(data)
        send, wanted = (data, None) if group.position == 0 else (None, receive)
        group.post(Kind.BROADCAST, send, wanted, segment=1 << 12, timeout_s=deadline(10)).wait()
        return receive

    with aggregators(limits=limits) as root:
        wire = LongWire(root, delay_s=0.05)
        with aggregators(limits=limits, parent=wire.address) as leaf:
            assert np.array_equal(members_of_tree([root, leaf], (2,), broadcast)[1], data)
        assert root.stats().groups_failed == 0
        wire.close()


def test_a_tree_without_a_parent_fails_with_the_reason():
    with aggregators() as server, pytest.raises(AggregationError, match="which has no parent"):
        members_of_tree([None, server], (2, 2)[:1], _every_kind, 1)


def test_a_long_message_needs_no_more_memory_than_the_windows():
    limits = Limits(window_nbytes=1 << 16, segment_nbytes=1 << 14)

    def long(group):
        data = np.full(1 << 20, group.position + 1, dtype=np.int32)
        result = np.zeros_like(data)
        work = group.post(
            Kind.ALL_REDUCE,
            data.view(np.uint8),
            result.view(np.uint8),
            operator=Operator.SUM,
            element=ElementType.INT32,
        )
        work.wait()
        return bool((result == 6).all())

    with aggregators(limits=limits) as server:
        assert all(members(server, 3, long))
        assert server._directory._pool._kept_nbytes <= 3 * (1 << 16) * 2


def test_many_groups_with_many_operations_at_once_on_one_connection():
    from concurrent.futures import ThreadPoolExecutor

    total, groups, operations = 3, 5, 8

    def one(server, position):
        client = AggregationClient(server.address, TOKEN)
        try:
            joined = [client.join(f"group {g}", total, position) for g in range(groups)]
            for group in joined:
                group.wait(deadline(20))
            order = list(range(groups))
            np.random.default_rng(position).shuffle(order)  # groups know nothing of each other
            works = []
            for g in order:
                for k in range(operations):
                    data = np.full(50_000 + k, position + g * 10 + k, dtype=np.int64)
                    result = np.zeros_like(data)
                    work = joined[g].post(
                        Kind.ALL_REDUCE,
                        data.view(np.uint8),
                        result.view(np.uint8),
                        operator=Operator.SUM,
                        element=ElementType.INT64,
                    )
                    works.append((work, result, sum(p + g * 10 + k for p in range(total))))
            for work, result, want in works:
                work.wait()
                assert (result == want).all()
            return len(works)
        finally:
            client.close()

    with aggregators() as server, ThreadPoolExecutor(total) as pool:
        assert list(pool.map(one, [server] * total, range(total))) == [groups * operations] * total
        assert server.stats().operations == {"all_reduce": groups * operations}
