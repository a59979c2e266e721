"""What a trace notes of the calls of a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.parallel.pipeline._forward_recorder import plain_numbers
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
