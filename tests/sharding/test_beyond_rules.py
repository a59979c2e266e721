"""What torch does past the rules: tensors to write to, numbers of Python, names that two functions share."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from hocket.sharding import (
    Shard,
    ShardingError,
    WholeBatchNorms,
    as_local,
    cut,
    gathered,
    guard_torch,
    join,
    note,
    noted,
    operator_name,
)

from .memory_peers import MemoryPeers, in_ranks


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Named as one of torch's functions, and another."""
    if has_torch_function_unary(x):
        made: torch.Tensor = handle_torch_function(normalize, (x,), x)
        return made
    return x / x.norm()


def written(function: Callable[..., Any], *shape: int, **kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(shape)
        assert function(x, **kwargs, out=out) is out
        return out.cumsum(0)

    return call


def into_a_row(x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(2, *x.shape)
    torch.mul(x, 2, out=rows[1])
    return rows.sum(0)


def pair(x: torch.Tensor) -> Any:
    out = torch.empty(0), torch.empty(0, dtype=torch.long)
    return torch.max(x, 1, out=out).values + out[0]


def added_into(start: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        made = start(x)
        made.addmm_(x, TABLE[:4, :4])
        return made

    return call


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x).sum()


@torch.jit.script
def scripted_in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


TRACED = torch.jit.trace(lambda x: x.softmax(-1).cumsum(0), torch.ones(4, 6))


@torch.library.custom_op("hocket_tests::doubled", mutates_args=("x",))
def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


guard_torch()  # as training does
TABLE = torch.arange(24.0).view(6, 4)
CASES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Any]]] = {
    "sum": ((4, 6, 2), written(torch.add, 4, 6, 2, other=1)),
    "where": ((4, 6), into_a_row),
    "two": ((4, 6), pair),
    "total": ((4, 6), written(torch.sum, 6, dim=0)),
    "mean": ((4, 6), written(torch.mean, 4, dim=1)),
    "softmax": ((4, 6), written(torch.softmax, 4, 6, dim=1)),
    "nothing yet": ((4, 6), written(torch.exp, 0)),
    "bytes": ((4, 6), lambda x: x * x.nbytes),
    "same size": ((4, 6), lambda x: x * (2 if x.is_same_size(torch.empty(4, 6)) else 1)),
    "number": ((1, 1), lambda x: x * float(x) * (2 if x > -9 else 1) * int(x + 9)),
    "a table first": ((6, 4), lambda x: torch.embedding(x, torch.tensor([[0, 2, 1], [1, 1, 5]]))),
    "indices last": ((4, 6), lambda x: torch.embedding(TABLE, (x.abs() * 2).long() % 6)),
    "aten": ((6, 4), lambda x: torch.ops.aten.embedding(x, torch.tensor([0, 2, 1, 4]))),
    "batch norm": ((2, 4, 6), lambda x: torch.batch_norm(x, TABLE[0], TABLE[1], None, None, True, 0.1, 1e-5, False)),
    "instance norm": ((2, 4, 6), lambda x: torch.instance_norm(x, TABLE[0], None, None, None, True, 0.1, 1e-5, False)),
    "weighted": ((4, 6), lambda x: F.l1_loss(x, torch.zeros(4, 6), weight=torch.arange(24.0).view(4, 6))),
    "weights": ((4, 6), lambda x: F.mse_loss(x, torch.zeros(4, 6), weight=torch.arange(24.0).view(4, 6))),
    "class weights": ((4, 4), lambda x: F.cross_entropy(x, torch.arange(4), x.detach()[:, 0].abs())),
    "variances": ((2, 4, 4), lambda x: F.gaussian_nll_loss(x, torch.zeros(2, 4, 4), torch.ones(2, 4))),
    "a word that is a number": (
        (4, 6),
        lambda x: torch.binary_cross_entropy_with_logits(x, torch.ones(4, 6), reduction=1),
    ),
    "a user's": ((4, 6), normalize),
    "scripted": ((4, 6), scripted),
    "scripted, in place": ((4, 6), lambda x: scripted_in_place(y := x * 1) + y),
    "traced": ((4, 6), TRACED),
    "numpy's words": ((4, 6, 2), lambda x: x * x.sum(axis=0, keepdims=True) + x.amax(axis=(1,), keepdims=True)),
    "numpy's words, more": ((4, 6, 2), lambda x: x.std(axis=1, keepdims=True) - x.logsumexp(axis=2, keepdims=True)),
    "nested": ((4, 6, 2), lambda x: torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0)),
    "nested as": ((4, 6, 2), lambda x: torch.nested.as_nested_tensor([x[2], x[1]]).to_padded_tensor(0.0)),
    "the second factor": ((6, 6), lambda x: x.__rmatmul__(torch.arange(36.0).view(6, 6))),
    "numpy's function": ((4, 6), lambda x: torch.Tensor.square(np.abs(torch.cat([x, x], 1)))),
    "dlpack": ((4, 6), lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))),
    "a copy": ((4, 6), lambda x: copy.deepcopy(x) * 2),
    "a weight as divided as its input": ((6, 6), lambda x: F.prelu(x, x[:, 0])),
    "a product added to a tensor that is whole": ((4, 4), added_into(lambda x: torch.ones(4, 4))),
    "a product added to a divided tensor": ((4, 4), added_into(lambda x: x * 2)),
    "written to a piece": ((4, 6), lambda x: x.clone().requires_grad_().mul(2).tensor_split(1, 1)[0].mul_(3).detach()),
    "rolled as a row": ((4, 6), lambda x: torch.roll(x, 1, [])),
    "nothing, as a row": ((4, 6, 2), lambda x: x[:, :0].ravel().sum() + x[:0].flatten(1).sum(0)[:2]),
    "one element, flat": ((1, 1, 1), lambda x: torch.cat([x.flatten(1), x.unflatten(1, (1, 1))[0, 0] * 2])),
    "a mean of halves": ((2, 256, 6), lambda x: (90 + x.half()).mean((1, 2))),
    "a loss of halves": ((2, 256, 6), lambda x: F.l1_loss(90 + x.half(), torch.zeros(2, 256, 6).half())),
    "pooled halves": ((2, 2, 64, 16), lambda x: F.avg_pool2d(90 + x.half(), (64, 16))),
    "pooled halves, adaptively": ((2, 2, 64, 16), lambda x: F.adaptive_avg_pool2d(90 + x.half(), 1)),
    "steps that change shapes in place": ((4, 6, 4), lambda x: torch.nanquantile(x, torch.tensor([0.1, 0.9]), dim=2)),
    "aten's convolution": (
        (4, 2, 3),
        lambda x: torch.ops.aten.conv1d(TABLE.view(2, 2, 6), x, None, [1], [1]),
    ),
}


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_made_is_that_of_the_full_tensor(name: str, exchanges: bool) -> None:
    shape, function = CASES[name]
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = function(full)
    for dim in range(len(shape)):
        if not exchanges and shape[dim] % 2:
            continue
        shard = Shard.even(dim, shape[dim], 2)

        def run(peers: MemoryPeers, shard: Shard = shard) -> torch.Tensor:
            peers.gathers = True
            made: torch.Tensor = gathered(function(note(cut(full, shard, peers.rank).clone(), shard, peers)))
            return made

        for found in in_ranks(2, exchanges, run):
            with as_local():
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [lambda x: x[1] * 2, lambda x: x.cumsum(0), lambda x: x.add_(1)[0], scripted])
def test_inference_mode_in_which_torch_counts_no_writes_changes_nothing(function: Any) -> None:
    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def run(peers: MemoryPeers) -> torch.Tensor:
        shard = Shard.even(0, 4, 2)
        with torch.inference_mode():
            made: torch.Tensor = gathered(function(note(cut(full, shard, peers.rank).clone(), shard, peers)))
        return made

    for found in in_ranks(2, True, run):
        torch.testing.assert_close(found, function(full.clone()))


def test_code_that_back_propagation_runs_again_is_asked_about_shards_too() -> None:
    """A pipeline measures its steps by back-propagation from divided tensors."""
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))

    def gradients(x: torch.Tensor, by_keyword: bool) -> list[torch.Tensor]:
        x.requires_grad_()
        h = x * 2
        y = checkpoint(lambda h: torch.relu(h @ weight) * h.shape[0], h, use_reentrant=False) + h
        if by_keyword:
            y.backward(gradient=torch.ones_like(y), inputs=[x], retain_graph=True)
        else:
            torch.autograd.backward([y], [torch.ones_like(y)], retain_graph=True)
        assert x.grad is not None
        return [x.grad, *torch.autograd.grad([y, h], [h], [y.detach(), h.detach()])]

    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for by_keyword in (False, True):
        expected = gradients(full.clone(), by_keyword)

        def run(peers: MemoryPeers, by_keyword: bool = by_keyword) -> list[torch.Tensor]:
            shard = Shard.even(0, 4, 2)
            peers.gathers = True
            return [
                gathered(one) for one in gradients(note(cut(full, shard, peers.rank).clone(), shard, peers), by_keyword)
            ]

        for found in in_ranks(2, False, run):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_a_tensor_of_another_shape_is_not_written_to() -> None:
    full = torch.zeros(4, 6)

    def run(peers: MemoryPeers) -> Any:
        shard = Shard.even(0, 4, 2)
        return torch.add(note(cut(full, shard, peers.rank), shard, peers), 1, out=torch.zeros(3))

    with pytest.raises(ShardingError, match="another shape"):
        in_ranks(2, False, run)


def test_a_tensor_of_a_type_that_torch_would_not_write_is_not_written_to() -> None:
    def run(peers: MemoryPeers) -> Any:
        shard = Shard.even(0, 4, 2)
        x = note(cut(torch.ones(4, 6), shard, peers.rank), shard, peers)
        return torch.add(x, 0.5, out=torch.zeros(4, 6, dtype=torch.long))

    with pytest.raises(ShardingError, match=r"torch.int64 to write torch.float32"):
        in_ranks(2, False, run)


def test_what_a_call_writes_to_a_gathered_tensor_is_not_lost() -> None:
    """An operator of a library says nothing of it by its name, nor does batch norm, which counts no writes."""

    def run(peers: MemoryPeers) -> Any:
        shard = Shard.even(0, 4, 2)
        x = note(cut(torch.ones(4, 6), shard, peers.rank).clone(), shard, peers)
        doubled(x)
        with pytest.raises(ShardingError, match="writes to several tensors"):
            torch._foreach_add_([x.view(-1), x[1]], 3.0)
        mean = note(cut(torch.ones(4), shard, peers.rank).clone(), shard, peers)
        F.batch_norm(TABLE[:2], mean, torch.ones(4), training=False)
        before = gathered(mean)
        F.batch_norm(TABLE[:2], mean, torch.ones(4), training=True)
        return gathered(x), before, gathered(mean)

    for x, before, after in in_ranks(2, True, run):
        assert x.tolist() == [[2.0] * 6] * 4
        assert before.tolist() == [1.0] * 4
        torch.testing.assert_close(after, 0.9 + 0.1 * TABLE[:2].mean(0))


class Copied(torch.autograd.Function):
    """A tensor that all ranks have, for use with shards in tensor parallelism: its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, peers: MemoryPeers, tensor: torch.Tensor) -> torch.Tensor:
        ctx.peers = peers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, torch.stack(ctx.peers.all(gradients[0])).sum(0)


class Gathered(torch.autograd.Function):
    """A full tensor, for use that is alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, peers: MemoryPeers, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
        ctx.peers, ctx.shard = peers, shard
        return join(peers.all(tensor), shard)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, cut(gradients[0], ctx.shard, ctx.peers.rank), None


class OwnGraphs(MemoryPeers):
    """Ranks of tensor parallelism, each of which propagates back by itself."""

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Any, fill: float) -> torch.Tensor:
        with as_local():
            full: torch.Tensor = Gathered.apply(self, tensor, shard)
            return full

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        with as_local():
            copy: torch.Tensor = Copied.apply(self, tensor)
            return copy


def in_views(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    row, flat, column = x[1], x.view(-1)[1:7], x.unbind(1)[0].detach()
    row.mul_(v[:4])  # a view, and then another that was gathered before
    flat.add_(v * row.sum())
    x.mul_(2)
    row[1:3].exp_()
    return x * column.sum() + row + flat.sum()


def in_place(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x[torch.tensor([0, 2])] = v[:4]
    x.index_add_(0, torch.tensor([1, 1]), v.expand(2, 6)[:, 1:5])
    x.cumsum_(0).cumsum_(1)
    x[:, 1:3] += v[0]
    x[0] *= v[1]
    return x


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", [in_views, in_place])
def test_writes_to_gathered_tensors_and_their_views_are_those_of_one_process(function: Any, dim: int) -> None:
    """Whole operands got the gradient of this rank's shard alone, and writes to views were refused."""
    generator = torch.Generator().manual_seed(0)
    full, vector = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (6,)))

    def gradients(x: torch.Tensor, v: torch.Tensor, y: Any) -> Any:
        y = gathered(y)
        return y, *torch.autograd.grad((y * torch.arange(16).view(4, 4)).sum(), [x, v])

    def run(peers: MemoryPeers) -> Any:
        own = OwnGraphs(peers._board, peers.rank, peers.size, False)
        own.gathers = True
        shard = Shard.even(dim, 4, 2)
        x, v = cut(full, shard, peers.rank).clone().requires_grad_(), vector.clone().requires_grad_()
        return gradients(x, v, function(note(x.view_as(x), shard, own) * 1, v))

    x, v = full.clone().requires_grad_(), vector.clone().requires_grad_()
    expected = gradients(x, v, function(x * 1, v))
    for rank, (y, of_x, of_v) in enumerate(in_ranks(2, False, run)):
        torch.testing.assert_close(y, expected[0])
        torch.testing.assert_close(of_x, cut(expected[1], Shard.even(dim, 4, 2), rank))
        torch.testing.assert_close(of_v, expected[2])


@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy", "as_strided_scatter"])
def test_what_reads_memory_in_its_order_is_refused(name: str) -> None:
    """What is gathered lies in memory as it came, not as the program's tensor would."""
    given = (torch.ones(2, 2),) if name == "as_strided_scatter" else ()

    def run(peers: MemoryPeers) -> Any:
        shard = Shard.even(0, 4, 2)
        x = note(cut(torch.randn(6, 4).T, shard, peers.rank), shard, peers)
        return getattr(torch, name)(x, *given, (2, 2), (1, 2), 1)

    with pytest.raises(ShardingError, match=f"{name} asks how the tensor lies in memory"):
        in_ranks(2, True, run)


def test_what_is_written_to_a_weight_reaches_whoever_holds_it() -> None:
    """Results that other tensors went into are gathered, which a call in place does not make."""

    def run(peers: MemoryPeers) -> torch.Tensor:
        shard = Shard.even(0, 4, 2)
        peers.gathers = True
        scale = note(torch.ones(2, 3), shard, peers, "alone") * 2
        scale.mul_(torch.full((4, 3), 3.0)).add_(1)
        made: torch.Tensor = gathered(scale)
        return made

    assert all(bool((one == 7).all()) for one in in_ranks(2, False, run))


def test_what_shares_memory_with_a_divided_tensor_follows_it() -> None:
    def run(peers: MemoryPeers) -> torch.Tensor:
        x = note(torch.ones(4, 1), Shard.even(1, 2, 2), peers)
        with WholeBatchNorms(peers):
            torch.as_tensor(x).mul_(2)
            made: torch.Tensor = gathered(torch.as_tensor(data=x, dtype=torch.float64))
        rows, _ = torch.meshgrid(x[:, 0], x[0], indexing="ij")  # one is gathered already, the other only now
        assert rows.tolist() == [[2.0, 2.0]] * 4
        x.mul_(2)
        assert rows.tolist() == [[4.0, 4.0]] * 4
        return made

    for one in in_ranks(2, True, run):
        assert one.dtype == torch.float64
        assert bool((one == 2).all())


REARRANGED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.Tensor.contiguous, torch.ravel, lambda y: y.flatten(1), lambda y: y.reshape(y.shape[0], -1),
    lambda y: y.reshape_as(y.detach()),
)  # fmt: skip


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dim", [0, 1])
def test_writes_to_a_view_of_one_row_reach_what_they_reach_in_the_full_tensor(dim: int, dims: tuple[int, ...]) -> None:
    """A shard of one row is contiguous whatever the full tensor is, so that `contiguous()` gave a view for its copy."""
    full = torch.arange(24.0).view(2, 3, 4)

    def written(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 1
        z = REARRANGED[number](y.permute(dims))
        z.mul_(2)
        return y, z

    def run(peers: MemoryPeers) -> dict[int, list[torch.Tensor]]:
        shard, found = Shard.even(dim, full.shape[dim], 2), {}
        x = note(cut(full, shard, peers.rank).clone(), shard, peers)
        for number in range(len(REARRANGED)):
            with contextlib.suppress(ShardingError):  # it was gathered, and may not be written to
                found[number] = [gathered(one) for one in written(x, number)]
        return found

    for found in in_ranks(2, True, run):
        assert 0 in found
        assert all(all(map(torch.equal, made, written(full, number))) for number, made in found.items())


def test_a_bias_that_is_divided_along_rows_does_not_go_with_a_weight_that_is_along_columns() -> None:
    full, weight = torch.tensor([[1.0], [2.0]]), torch.ones(3, 2)

    def run(peers: MemoryPeers) -> torch.Tensor:
        peers.gathers = True
        bias = note(cut(full, rows := Shard.even(0, 2, 2), peers.rank), rows, peers)
        divided = note(cut(weight, columns := Shard.even(1, 2, 2), peers.rank), columns, peers)
        made: torch.Tensor = gathered(torch.addmm(bias, torch.zeros(2, 3), divided))
        return made

    assert all(one.tolist() == [[1.0, 1.0], [2.0, 2.0]] for one in in_ranks(2, False, run))


def test_what_is_written_to_stays_divided() -> None:
    def run(peers: MemoryPeers) -> Any:
        shard = Shard.even(0, 4, 2)
        x, out = (note(torch.ones(2, 3), shard, peers) for _ in range(2))
        assert torch.add(x, 1, out=out) is out
        assert noted(out) == shard
        return out.sum(1)

    with as_local():
        assert all(one.tolist() == [6.0, 6.0] for one in in_ranks(2, False, run))


def test_a_function_of_torch_that_a_program_wraps_keeps_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.softplus

    def softplus(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    assert operator_name(softplus) != "softplus"
    monkeypatch.setattr(F, "softplus", softplus)
    assert operator_name(softplus) == "softplus"


@pytest.mark.long
def test_back_propagation_that_the_backend_listens_to_keeps_its_rule() -> None:
    """Ranks under a launcher listen twice; where that went unknown, GPT-2 divided by tensors stalled."""
    script = """
import torch
from hocket.comm import autoload, torch_adapter
from hocket.sharding import operator_name
autoload._say_if_alone()
torch_adapter.before_backward(torch_adapter)
print(operator_name(torch.autograd.backward))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "WORLD_SIZE": "2"},
    )
    assert done.stdout.split() == ["backward"]
