"""Every collective of the shared-memory transport against its definition, ranks as threads."""

import socket
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from hocket import comm
from hocket.comm.shm import host_identity
from hocket.comm.shm._sizes import CPU_SIZES
from hocket.comm.transport._errors import CollectiveMismatchError, CollectiveTimeoutError, CommError
from hocket.comm.transport._reduce import reducer

from ..thread_world import TIMEOUT_S, ThreadWorld

WORLDS = [2, 3, 4, 5]
# Around the borders: nothing, one, one-shot, direct, pieces of 1 MiB, blocks of 1.5 MiB, a chain (float32 elements).
SIZES = [0, 1, 7, 1000, 2**14, 2**14 + 1, 2**17, 2**17 + 3, 2**18 + 5, 700_001, 2**20, 1_200_003]


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    return ThreadWorld(request.param)


def _inputs(n: int, numel: int, dtype: torch.dtype = torch.float32, registered: object = ()) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    made = []
    for r in range(n):
        values = torch.randn(numel, generator=generator).mul(3).to(dtype)
        if registered is True or (not isinstance(registered, bool) and r in registered):
            values = comm.empty(numel, dtype=dtype).copy_(values)
        made.append(values)
    return made


def _in_rank_order(inputs, kernel):
    result = inputs[0].clone()
    for other in inputs[1:]:
        result = kernel(result, other)
    return result


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("registered", [False, True, (0,)], ids=["staged", "registered", "mixed"])
def test_all_reduce_sums_in_the_order_of_ranks_bit_for_bit(world, numel, registered):
    inputs = _inputs(world.n, numel, registered=registered)
    expected = _in_rank_order(inputs, torch.add)
    op = reducer(ReduceOp.SUM, torch.float32)
    paths = world.values(lambda r, t: t.all_reduce(inputs[r], op, TIMEOUT_S))
    for result in inputs:
        assert torch.equal(result, expected)
    direct = registered is True and numel * 4 >= CPU_SIZES.direct
    if world.n > 2 and numel * 4 <= CPU_SIZES.one_shot and not direct:
        assert set(paths) == {"shm-staged"}
    assert len(set(paths)) == 1
    assert (paths[0] == "shm-direct") == direct


CASES = [
    (ReduceOp.SUM, np.add),
    (ReduceOp.PRODUCT, np.multiply),
    (ReduceOp.MIN, np.minimum),
    (ReduceOp.MAX, np.maximum),
    (ReduceOp.BAND, np.bitwise_and),
    (ReduceOp.BOR, np.bitwise_or),
    (ReduceOp.BXOR, np.bitwise_xor),
]


@pytest.mark.parametrize(("op", "ufunc"), CASES, ids=[str(c[0]) for c in CASES])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.uint16, torch.float64, torch.bool])
def test_operators_agree_with_numpy(op, ufunc, dtype):
    world = ThreadWorld(3)
    bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    if (dtype == torch.float64 and bitwise) or (dtype == torch.uint16 and op in (ReduceOp.MIN, ReduceOp.MAX)):
        with pytest.raises(TypeError, match=str(dtype)):
            reducer(op, dtype)
        return
    kernel = reducer(op, dtype)
    inputs = [(torch.arange(40) * (r + 3) % 11).to(dtype) for r in range(world.n)]
    expected = ufunc.reduce([i.numpy() for i in inputs], dtype=inputs[0].numpy().dtype)
    world.values(lambda r, t: t.all_reduce(inputs[r], kernel, TIMEOUT_S))
    for result in inputs:
        np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("numel", [10, 400_000, 1_200_003])
@pytest.mark.parametrize("registered", [False, True])
def test_averages(numel, registered):
    world = ThreadWorld(3)
    inputs = _inputs(3, numel, registered=registered)
    expected = _in_rank_order(inputs, torch.add) / 3
    average = reducer(ReduceOp.AVG, torch.float32)
    world.values(lambda r, t: t.all_reduce(inputs[r], average, TIMEOUT_S))
    assert all(torch.equal(i, expected) for i in inputs)
    integers = [torch.tensor([-7, 7, 8]) for _ in range(3)]
    integers[0] -= 1
    truncated = reducer(ReduceOp.AVG, torch.int64)
    world.values(lambda r, t: t.all_reduce(integers[r], truncated, TIMEOUT_S))
    assert integers[1].tolist() == [-7, 6, 7], "-22/3, 20/3 and 23/3 rounded towards zero"
    wide = [integers[1].repeat(numel) - r for r in range(3)]
    expected = _in_rank_order(wide, torch.add).div(3, rounding_mode="trunc")
    world.values(lambda r, t: t.all_reduce(wide[r], truncated, TIMEOUT_S))
    assert all(torch.equal(i, expected) for i in wide)
    complex_ = [torch.view_as_complex(i[: numel // 2 * 2].view(-1, 2)) for i in _inputs(3, numel)]
    expected = torch.view_as_real(_in_rank_order(complex_, torch.add)) / 3
    mean = reducer(ReduceOp.AVG, torch.complex64)
    world.values(lambda r, t: t.all_reduce(complex_[r], mean, TIMEOUT_S))
    assert all(torch.equal(torch.view_as_real(i), expected) for i in complex_)


@pytest.mark.parametrize("numel", [0, 1, 1000, 2**18 + 5])
def test_reduce_leaves_other_ranks_alone(world, numel):
    inputs = _inputs(world.n, numel)
    before = [i.clone() for i in inputs]
    root = world.n - 1
    world.values(lambda r, t: t.reduce(inputs[r], reducer(ReduceOp.SUM, torch.float32), root, TIMEOUT_S))
    for r in range(world.n):
        assert torch.equal(inputs[r], _in_rank_order(before, torch.add) if r == root else before[r])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_copies_arrive_whole(data):
    n = data.draw(st.sampled_from(WORLDS))
    numel = data.draw(st.sampled_from([0, 1, 5, 4099, 2**16, 2**17 + 1, 300_007]))
    registered = data.draw(st.booleans())
    root = data.draw(st.integers(0, n - 1))
    world = _worlds(n)
    inputs = _inputs(n, numel, registered=registered)
    gathered = [[torch.empty(numel) for _ in range(n)] for _ in range(n)]
    world.values(lambda r, t: t.all_gather(gathered[r], inputs[r], TIMEOUT_S))
    assert all(torch.equal(gathered[r][s], inputs[s]) for r in range(n) for s in range(n))
    at_root = [torch.empty(numel) for _ in range(n)]
    world.values(lambda r, t: t.gather(at_root if r == root else None, inputs[r], root, TIMEOUT_S))
    assert all(torch.equal(at_root[s], inputs[s]) for s in range(n))
    parts = [torch.empty(numel) for _ in range(n)]
    world.values(lambda r, t: t.scatter(parts[r], inputs if r == root else None, root, TIMEOUT_S))
    assert all(torch.equal(parts[s], inputs[s]) for s in range(n))
    expected = inputs[root].clone()
    world.values(lambda r, t: t.broadcast(inputs[r], root, TIMEOUT_S))
    assert all(torch.equal(i, expected) for i in inputs)


_kept: dict[int, ThreadWorld] = {}


def _worlds(n: int) -> ThreadWorld:
    if n not in _kept:
        _kept[n] = ThreadWorld(n)
    return _kept[n]


@pytest.mark.parametrize("numel", [0, 1, 1000, 2**16 + 1, 2**18 + 5])
@pytest.mark.parametrize("registered", [False, True], ids=["staged", "registered"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_gives_each_rank_its_part(world, numel, registered, in_place):
    n = world.n
    whole = _inputs(n, n * numel, registered=registered)
    expected = _in_rank_order(whole, torch.add)
    inputs = [list(w.split(numel)) if numel else [w] * n for w in whole]
    outputs = [inputs[r][r] if in_place else torch.empty(numel) for r in range(n)]
    op = reducer(ReduceOp.SUM, torch.float32)
    world.values(lambda r, t: t.reduce_scatter(outputs[r], inputs[r], op, TIMEOUT_S))
    for r in range(n):
        assert torch.equal(outputs[r], expected[r * numel : (r + 1) * numel])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_all_to_all_with_any_sizes(data):
    n = data.draw(st.sampled_from(WORLDS))
    scale = data.draw(st.sampled_from([1, 100, 60_000]))
    sizes = [[data.draw(st.integers(0, 4)) * scale for _ in range(n)] for _ in range(n)]
    inputs = [[torch.full((sizes[r][s],), 10 * r + s, dtype=torch.int32) for s in range(n)] for r in range(n)]
    outputs = [[torch.zeros(sizes[s][r], dtype=torch.int32) for s in range(n)] for r in range(n)]
    _worlds(n).values(lambda r, t: t.all_to_all(outputs[r], inputs[r], TIMEOUT_S))
    assert all(torch.equal(outputs[r][s], inputs[s][r]) for r in range(n) for s in range(n))


def test_mismatches_are_errors_on_every_rank_and_leave_the_group_usable():
    world = ThreadWorld(3)
    op = reducer(ReduceOp.SUM, torch.float32)
    other = reducer(ReduceOp.MAX, torch.float32)
    cases = {
        "size": lambda r, t: t.all_reduce(torch.zeros(5 + (r == 1)), op, TIMEOUT_S),
        "large size": lambda r, t: t.all_reduce(torch.zeros(500_000 + (r == 1)), op, TIMEOUT_S),
        "type": lambda r, t: t.broadcast(torch.zeros(4, dtype=torch.int32 if r else torch.float32), 0, TIMEOUT_S),
        "operator": lambda r, t: t.all_reduce(torch.zeros(5), other if r == 2 else op, TIMEOUT_S),
        "root": lambda r, t: t.broadcast(torch.zeros(5), int(r == 2), TIMEOUT_S),
        "kind": lambda r, t: t.barrier(TIMEOUT_S) if r == 1 else t.all_reduce(torch.zeros(5), op, TIMEOUT_S),
        "split": lambda r, t: t.all_to_all([torch.zeros(2)] * 3, [torch.zeros(2 + (r == 1))] * 3, TIMEOUT_S),
    }
    for case, body in cases.items():
        results = world.run(body)
        assert all(isinstance(result, CollectiveMismatchError) for result in results), (case, results)
        ones = [torch.ones(3) for _ in range(3)]
        world.values(lambda r, t, ones=ones: t.all_reduce(ones[r], op, TIMEOUT_S))
        assert all(one.tolist() == [3.0] * 3 for one in ones), case
    text = str(world.run(cases["operator"])[0])
    assert "rank 2: all_reduce" in text
    assert "with MAX" in text


def test_a_timeout_names_who_has_not_arrived_and_where_it_was():
    world = ThreadWorld(3)
    world.values(lambda r, t: t.barrier(TIMEOUT_S))
    results = world.run(lambda r, t: None if r == 1 else t.barrier(0.3))
    for r in (0, 2):
        assert isinstance(results[r], CollectiveTimeoutError)
        assert results[r].missing == (1,)
        assert "rank 1 was last at barrier #1" in str(results[r])
        assert "barrier #2" in str(results[r])


def test_who_comes_after_another_has_given_up_is_told_so_instead_of_finding_all_well():
    world = ThreadWorld(2)
    data = [torch.full((10,), float(r)) for r in range(2)]
    op = reducer(ReduceOp.SUM, torch.float32)
    with pytest.raises(CollectiveTimeoutError) as caught:
        world.transports[0].all_reduce(data[0], op, 0.1)
    world.channels[0].fail(caught.value)
    with pytest.raises(CollectiveTimeoutError, match="timeout of 0.1 s on rank 0: not arrived: rank 1") as told:
        world.transports[1].all_reduce(data[1], op, TIMEOUT_S)
    assert told.value.missing == told.value.culprits == (1,)
    assert torch.equal(data[1], torch.ones(10))


def test_who_fails_between_operations_takes_nothing_back_that_others_have_yet_to_see():
    world = ThreadWorld(2)
    world.values(lambda r, t: t.barrier(TIMEOUT_S))
    world.channels[0].fail(ValueError("the program's own"))
    assert world.channels[0]._mine[0] == world.channels[0]._phase
    with pytest.raises(CommError, match="rank 0 failed in barrier #2 .*the program's own"):
        world.transports[1].barrier(TIMEOUT_S)


def test_sequence_numbers_wrap_around():
    world = ThreadWorld(2)
    for channel in world.channels:
        channel._phase = 2**32 - 3
        channel._mine[0] = 2**32 - 3
    tensors = [torch.full((300_000,), float(r)) for r in range(2)]
    op = reducer(ReduceOp.SUM, torch.float32)
    for _ in range(3):
        world.values(lambda r, t: t.all_reduce(tensors[r], op, TIMEOUT_S))
    assert tensors[0][0] == 4.0
    assert world.channels[0]._phase < 100


@pytest.mark.parametrize("registered", [False, True])
def test_inference_mode_does_not_leak_into_later_operations(registered):
    world = ThreadWorld(2)
    op = reducer(ReduceOp.SUM, torch.float32)

    def inside(rank, transport):
        with torch.inference_mode():
            tensor = comm.empty(400_000).fill_(1) if registered else torch.ones(400_000)
            transport.all_reduce(tensor, op, TIMEOUT_S)
            return tensor[0].item()

    assert world.values(inside) == [2.0, 2.0]
    outside = _inputs(2, 400_000, registered=registered)
    expected = outside[0] + outside[1]
    world.values(lambda r, t: t.all_reduce(outside[r], op, TIMEOUT_S))
    assert torch.equal(outside[0], expected)


def test_a_host_that_hides_its_boot_s_number_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=FileNotFoundError("/proc/sys")))
    assert host_identity().startswith(f"{socket.gethostname()}:")
