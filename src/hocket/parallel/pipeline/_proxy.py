"""Values during tracing: each stands for a node of the graph, and knows what that node gave on the sample.

What Python must know at once (a branch, the length of a loop, an index) is answered from the sample, and a check is put
into the graph that a later batch gives the same answer; what depends on the numbers in a tensor is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .torch_adapter import Attribute


class DataDependentError(RuntimeError):
    """The code branches on numbers that a model computes."""


class OtherBranchError(RuntimeError):
    """A batch takes another way through the model than the sample that it was split with."""


def same(value: Any, expected: Any, what: str) -> None:
    """A node of the graph: checks that code which was traced once holds for this batch too.

    Raises:
        OtherBranchError: it does not.
    """
    if value != expected:
        raise OtherBranchError(
            f"{what} was {expected!r} for the sample that the model was split with and is {value!r} for this batch, so "
            "its code would take another way. Give split() a sample like the batches, or keep the part of the model "
            "that depends on it in one module, and that module in one stage"
        )


class TracedValue(fx.Proxy):  # type: ignore[no-any-unimported, misc, unused-ignore]
    """A node and its value on the sample."""

    @property
    def sampled(self) -> Any:
        """What the node gave on the sample."""
        return self.node.meta["value"]

    def __getattr__(self, name: str) -> Any:
        return _Member(self, name)

    def __len__(self) -> int:
        return int(self._settled(len(self.sampled), len, isinstance(self.sampled, torch.Tensor)))

    def __iter__(self) -> Iterator[Any]:
        value = self.sampled
        if isinstance(value, dict):
            return iter(value)
        item: Any = self
        return iter([item[i] for i in range(len(self))])

    def __index__(self) -> int:
        return int(self._settled(self._plain(int), int, True))

    def __int__(self) -> int:
        return int(self._settled(self._plain(int), int, True))

    def __float__(self) -> float:
        return float(self._settled(self._plain(float), float, True))

    def __bool__(self) -> bool:
        return bool(self.tracer.to_bool(self))

    def settled_bool(self) -> bool:
        """The sample's answer, with a check that it holds for other batches."""
        return bool(self._settled(self._plain(bool), bool, True))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __contains__(self, item: Any) -> bool:
        return item in self.sampled

    def _plain(self, kind: type) -> Any:
        if isinstance(self.sampled, torch.Tensor):
            raise DataDependentError(f"the code needs {kind.__name__}() of a tensor ({self.node}) to go on")
        return kind(self.sampled)

    def _settled(self, answer: Any, how: Any, check: bool) -> Any:
        if check:
            found = self.tracer.create_proxy("call_function", how, (self,), {})
            self.tracer.create_proxy("call_function", same, (found, answer, f"{how.__name__}({self.node.name})"), {})
        return answer


class _Member(TracedValue, Attribute):  # type: ignore[misc, unused-ignore]
    """`value.name`; a node of its own only if it is not called as a method."""

    def __init__(self, root: TracedValue, name: str) -> None:
        Attribute.__init__(self, root, name)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Made when it is first needed."""
        return Attribute.node.fget(self)  # type: ignore[attr-defined, no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Attribute.__call__(self, *args, **kwargs)
