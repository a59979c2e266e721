"""Which gradients travel together, when, and in what memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket import cluster
from hocket.comm.shm._memory import shared_memory
from hocket.parallel.data._bucket import bucket_layout
from hocket.planner import BucketSizes, Plan, predict
from hocket.planner.plan._bucket_sizes import MAX_BUCKET_NBYTES, MIN_BUCKET_NBYTES
from hocket.testing import RankError, run_ranks
from hocket.workload import Layer, Operation, Workload

parameters = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["a", "b"])), min_size=1, max_size=40)


@given(parameters, st.integers(1, 8000), st.integers(1, 8000), st.randoms())
def test_plan_covers_all_in_order_within_sizes(
    sized: list[tuple[int, str]], most: int, first: int, random: Any
) -> None:
    nbytes, kinds = [s for s, _ in sized], [k for _, k in sized]
    order = list(range(len(sized)))
    random.shuffle(order)
    sizes = BucketSizes(most, min(first, most))
    buckets = bucket_layout(order, nbytes, kinds, sizes)
    position = {number: i for i, number in enumerate(order)}
    assert sorted(i for bucket in buckets for i in bucket) == sorted(order)
    for bucket in buckets:
        assert [position[i] for i in bucket] == sorted(position[i] for i in bucket)
        assert len({kinds[i] for i in bucket}) == 1
        assert sum(nbytes[i] for i in bucket) <= most or len(bucket) == 1
    full_at = [position[bucket[-1]] for bucket in buckets]
    assert full_at == sorted(full_at)
    if len(set(kinds)) == 1:
        assert sum(nbytes[i] for i in buckets[0]) <= sizes.first or len(buckets[0]) == 1


@pytest.mark.parametrize(
    ("total", "most"),
    [(0, MIN_BUCKET_NBYTES), (6 << 20, MIN_BUCKET_NBYTES), (200 << 20, 25 << 20), (4 << 30, MAX_BUCKET_NBYTES)],
)
def test_sizes_without_wishes_follow_the_model(total: int, most: int) -> None:
    assert BucketSizes.choose(total) == BucketSizes(most, most)


def test_sizes_that_are_asked_for_are_kept() -> None:
    assert BucketSizes.choose(1 << 30, 64 << 20, None) == BucketSizes(64 << 20, 64 << 20)
    assert BucketSizes.choose(1 << 30, 100, 1000) == BucketSizes(100, 100)
    with pytest.raises(ValueError, match="first_bucket_bytes must be a positive number of bytes, not 0"):
        BucketSizes.choose(1, None, 0)


def largest_bucket_nbytes() -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(40)))
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), Plan())
    x = torch.ones(2, 512)
    trainer.step((x, x))
    form: Any = trainer._composition.form
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(bucket.flat.nbytes for bucket in form._reducer.buckets), total


def test_the_trainer_takes_the_size_that_the_planner_times() -> None:
    for largest, total in run_ranks(largest_bucket_nbytes, 2):
        most = BucketSizes.choose(total).most
        assert most < total
        assert most - 2**20 < largest <= most + 4 * 40  # whole layers of 1 MiB, and which parameters were used
        work = (Operation("forward", 1e9, saved_bytes=1e6),)
        layers = tuple(Layer(f"l{i}", "x", 2**18, 2**20, 2**20, 0, 1e5, work, 1e-3, 2e-3) for i in range(40))
        where = cluster.load("star:hosts=2,bandwidth=1Gbit/s,latency=15us")
        said, unsaid = (
            predict(wanted, Workload("net", 1, layers), where, workers=2, batch=2).step_s
            for wanted in (Plan(bucket_bytes=most), Plan())
        )
        assert unsaid == said


class Recording:
    """The buckets that were reduced, in the order of posting, and when gradients had arrived."""

    def __init__(self, model: nn.Module) -> None:
        self.posted: dict[str, float] = {}
        self.arrived: dict[str, float] = {}
        self.paths: set[str] = set()
        self.nodes = []  # a parameter's own hooks are called with the average, when all have arrived
        for name, parameter in model.named_parameters():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_prehook(lambda _, name=name: self.arrived.update({name: time.perf_counter()}))
            self.nodes.append(node)
        hocket.comm.observe(self)

    def operation_finished(self, op: Any) -> None:
        if op.label is not None and op.label.startswith("bucket "):
            assert op.label not in self.posted, "reduced twice"
            self.posted[op.label] = op.posted_s
            self.paths.add(op.path)

    def operation_waited(self, op: Any, begin_s: float, end_s: float) -> None:
        pass

    def take(self) -> tuple[list[str], dict[str, float], dict[str, float]]:
        posted, arrived = self.posted, self.arrived
        self.posted, self.arrived = {}, {}
        return sorted(posted, key=posted.__getitem__), posted, arrived


class Backwards(nn.Module):
    """Uses its layers in the opposite order of their registration."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def overlap() -> tuple[list[list[str]], list[bool], set[str]]:
    model = Backwards(4)
    record = Recording(model)
    model = hocket.distribute(model, bucket_bytes=64 * 64 * 4)[0]
    orders, early = [], []
    for _ in range(4):
        model(torch.randn(8, 64)).square().mean().backward()
        order, posted, arrived = record.take()
        orders.append(order)
        early.append(posted["bucket 0"] < max(arrived.values()))
        model.zero_grad()
    return orders, early, record.paths


def test_buckets_go_in_order_and_early_once_the_order_of_use_is_known() -> None:
    for orders, early, paths in run_ranks(overlap, 2):
        assert orders == [[f"bucket {i}" for i in range(4)]] * 4
        assert early == [False, True, True, True]
        assert paths <= {"shm-direct", "shm-staged"}


def memory() -> tuple[bool, bool, set[str]]:
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))
    record = Recording(model)
    model = hocket.distribute(model, bucket_bytes=4 << 20)[0]
    model(torch.randn(8, 64)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return (
        all(hocket.comm.is_registered(g) for g in grads),
        len({g.untyped_storage().data_ptr() for g in grads}) == 1,
        record.paths,
    )


def test_gradients_live_in_shared_memory_and_are_reduced_in_place() -> None:
    assert run_ranks(memory, 2) == [(True, True, {"shm-direct"})] * 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        for part in list(self.parts)[1:]:
            x = checkpoint(part, x, use_reentrant=True)
        return x


def nested() -> list[str]:
    model = Nested()
    record = Recording(model)
    model = hocket.distribute(model, bucket_bytes=1)[0]
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    return record.take()[0]


def test_nested_back_propagations_count_as_one() -> None:
    assert run_ranks(nested, 2) == [[f"bucket {i}" for i in range(6)]] * 2


def slope() -> list[str]:
    model = nn.Linear(3, 2)
    record = Recording(model)
    model = hocket.distribute(model)[0]
    x = torch.randn(2, 3, requires_grad=True)
    model(x).sum().backward()
    record.take()
    torch.autograd.grad(model(x).sum(), x)
    return record.take()[0]


def test_a_gradient_of_inputs_reduces_nothing() -> None:
    assert run_ranks(slope, 2) == [[]] * 2


def sparse() -> None:
    model = hocket.distribute(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)))[0]
    model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name() -> None:
    said = r"parameter '0\.weight' has a gradient of layout torch\.sparse_coo.*plan=hocket\.Plan\(embeddings=.row.\)"
    with pytest.raises(RankError, match=said):
        run_ranks(sparse, 2)


def alone() -> tuple[bool, bool, Any]:
    model = nn.Linear(3, 2)
    wrapped, optimizer, loader = hocket.distribute(model)
    wrapped(torch.ones(1, 3)).sum().backward()
    joined = dist.is_initialized() and dist.get_backend() == "hocket"
    return joined, hocket.comm.is_registered(model.weight.grad), (optimizer, loader)


def test_alone_nothing_is_done_to_gradients() -> None:
    assert run_ranks(alone, 1, backend=None) == [(True, False, (None, None))]


class LastLayerFirst(nn.Sequential):
    """Gradients arrive in another order than one expects, so that buckets are laid out anew in the second step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


def shared_nbytes() -> int:
    """Bytes that tensors in shared memory have."""
    return sum(a.segment.nbytes - sum(nbytes for _, nbytes in a.free) for a in shared_memory._arenas)


def memory_of_gradients() -> list[tuple[int, int, int]]:
    """Bytes after building, at most, and wanted: with the Trainer, and with a loop that drops them after forward."""
    found = []
    allocate, x = shared_memory.allocate, torch.ones(2, 512)
    for own_loop in (False, True):
        model = LastLayerFirst(*(nn.Linear(512, 512) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        most, before = 0, shared_nbytes()

        def counted(nbytes: int, before: int = before) -> memoryview:
            nonlocal most
            memory = allocate(nbytes)
            most = max(most, shared_nbytes() - before)
            return memory

        if own_loop:
            trained, _, _ = hocket.distribute(model, optimizer, [], bucket_bytes=3 << 20)
        else:
            trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan(bucket_bytes=3 << 20))
        built = shared_nbytes() - before
        shared_memory.allocate = counted  # type: ignore[method-assign]
        for _ in range(4):
            if own_loop:
                loss = nn.functional.mse_loss(trained(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                trainer.step((x, x))
        shared_memory.allocate = allocate  # type: ignore[method-assign]
        found.append((built, most, sum(p.numel() * 4 for p in model.parameters())))
    return found


def test_gradients_have_their_memory_once_though_buckets_are_laid_out_anew() -> None:
    for rank in run_ranks(memory_of_gradients, 2):
        for built, most, wanted in rank:
            assert built < 1e5  # none before there is a gradient, but for a message or two
            assert wanted <= most < 1.05 * wanted
