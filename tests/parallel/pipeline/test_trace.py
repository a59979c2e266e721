"""What a trace notes of the calls of a forward."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from hocket.parallel.pipeline import SplitError, split
from hocket.parallel.pipeline._forward_recorder import plain_numbers
from hocket.parallel.pipeline._measure import measured
from hocket.parallel.pipeline._numbers import OtherBranchError
from hocket.parallel.pipeline._partition import build, hiding
from hocket.parallel.pipeline._trace import trace


class Repeats(nn.Module):
    """Repeats each number as many times as it is told, or as a tensor says."""

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        even = torch.repeat_interleave(x, 2, dim=-1)
        alike = torch.repeat_interleave(input=x, repeats=3, dim=0)
        known = torch.repeat_interleave(x, counts, dim=0, output_size=4)
        return even, alike, known, torch.repeat_interleave(x, counts, dim=0), x[counts > 1]


def test_only_what_depends_on_numbers_has_a_shape_of_its_own() -> None:
    graph = trace(Repeats(), (torch.randn(2, 3), torch.tensor([1, 3]))).graph
    assert [node.meta["loose"] for node in graph.nodes if "interleave" in node.name] == [False, False, False, True]
    assert [node.meta["loose"] for node in graph.nodes if "getitem" in node.name] == [True]


class LikeTimms(nn.BatchNorm2d):
    """A batch norm with a forward of its own that reads `self.training`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training))


def test_a_batch_norm_of_one_s_own_is_one_step() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(1, 2, 3), LikeTimms(2)), (torch.randn(2, 1, 4, 4),)).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_numbers_that_a_whole_module_gives_are_watched() -> None:
    assert plain_numbers((torch.ones(2), [1, 2.5, None, True, "a"], {"b": 4})) == (1.0, 2.5, 4.0)


class Sized(nn.Module):
    """Reads a size from a tensor, as a router of experts does."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return x, [int((x > 0).sum()), 3]


def test_they_are_asked_of_the_module_s_own_result() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sized = Sized()

        def forward(self, x: Tensor) -> Tensor:
            y, sizes = self.sized(x)
            return y * sizes[0]

    graph = trace(Model(), (torch.ones(2, 3),)).graph
    checks = [node for node in graph.nodes if "SameAnswer" in type(node.target).__name__]
    assert [node.args[0].op for node in checks if node.target.how is plain_numbers] == ["call_module"]


class Demanding(nn.Module):
    """Demands something of what it has computed, as models of words and pictures do, and takes no branch by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all_with(ValueError, x.sum() > 0, lambda: "pictures and words do not match")
        return self.second(self.first(x))


def test_what_the_code_demands_of_numbers_is_a_step_and_holds_for_every_batch() -> None:
    model = Demanding()
    traced = trace(model, (torch.ones(2, 3),))
    assert not traced.whole
    first, _ = build(traced, [next(i for i, node in enumerate(traced.steps) if node.target == "second")])
    assert torch.equal(first.module(torch.ones(4, 3))[0], model.first(torch.ones(4, 3)))
    with pytest.raises(ValueError, match="pictures and words do not match"):
        first.module(-torch.ones(2, 3))


class Cache:
    """Keeps a tensor where no walk through structures finds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers = [{"keys": tensor}]


class Caching(nn.Module):
    """Stays whole, as it branches on data, and gives a cache beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        y = self.linear(x) * len(x.sum(1).tolist())
        return y, Cache(y)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Caching(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.body(x)
        return self.head(y)


def test_an_object_with_tensors_in_it_does_not_cross() -> None:
    traced = trace(Headed(), (torch.randn(2, 3),))
    assert list(traced.whole) == ["body"]
    assert hiding(traced)[:2] == ["", "Cache"]
    times = [1.0] + [1e-9] * (len(traced.steps) - 2) + [1.0]
    _, second = split(Headed(), 2, (torch.randn(2, 3),), times=times)
    assert "body" not in second.takes
    with pytest.raises(SplitError, match="an object of type Cache would cross a cut.*use_cache = False"):
        build(traced, [1])


class Guarded(nn.Module):
    """Raises an error for some numbers, and takes another way for none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() >= 9:
            raise ValueError(f"{x.max()} is too large")
        assert (x.isfinite()).all(), "not a number"
        return self.second(torch.distributions.Normal(self.first(x), 1.0).mean)  # torch looks at its arguments


class Leaving(nn.Linear):
    """Has an error in a branch that it may leave otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() >= 9:
            if self.in_features:
                return x
            raise ValueError("too large")
        return super().forward(x)


def test_a_condition_that_only_an_error_depends_on_is_checked_for_each_batch() -> None:
    traced = trace(Guarded(), (torch.ones(2, 3),))
    assert not traced.whole
    first, _ = build(traced, [next(i for i, node in enumerate(traced.steps) if node.target == "second")])
    first.module(torch.zeros(2, 3))
    with pytest.raises(OtherBranchError, match=r"`if x.max\(\) >= 9:` .*gave False for the sample"):
        first.module(torch.full((2, 3), 9.0))
    with pytest.raises(OtherBranchError, match=r"`assert .*gave True for the sample"):
        first.module(torch.full((2, 3), -torch.inf))
    with pytest.raises(SplitError, match=r"`if x.max\(\) >= 9:` .*the code needs bool.* give the model no labels"):
        trace(Leaving(3, 3), (torch.ones(2, 3),))


class Positions(nn.Module):
    """Keeps what it has made by sizes, so that it must stay whole."""

    def forward(self, size: torch.Size) -> Tensor:
        return self.made(size)

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def made(size: torch.Size) -> Tensor:
        return torch.ones(size)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = Positions(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.positions(x.shape))


def test_sizes_that_a_whole_module_takes_are_plain() -> None:
    assert list(trace(Placed(), (torch.ones(2, 3),)).whole) == ["positions"]


class Masking(nn.Module):
    """Draws a mask by numbers of its own, through which nothing flows back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(torch.where(torch.bernoulli(y, p=0.5) == 1, y, 0))


def test_steps_without_a_derivative_are_measured() -> None:
    times = measured(trace(Masking(), (torch.ones(2, 3),)), repeats=1)
    assert "bernoulli" in times.names
