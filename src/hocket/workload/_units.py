"""The parts of a module at which a chain can be cut, and small things that capturing needs."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ._share import WorkloadError

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Unit:
    name: str
    module: nn.Module


def units_of(model: nn.Module) -> list[Unit]:
    """Return the parts at which a chain can be cut."""
    found: list[Unit] = []

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            if isinstance(child, nn.Sequential | nn.ModuleList) and len(child):
                visit(child, inner)
            else:
                found.append(Unit(inner, child))

    visit(model, "")
    return found or [Unit("model", model)]


@contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def samples(batch: Any) -> int:
    for one in tree_flatten(batch)[0]:
        if isinstance(one, Tensor) and one.dim():
            return int(one.shape[0])
    raise WorkloadError("capture: the sample holds no tensor with a dimension that counts samples")


def returned(result: Any) -> list[Tensor]:
    """Return the tensors in what a model returns: in tuples, lists, dictionaries and dataclasses."""
    found = []
    for one in tree_flatten(result)[0]:
        if isinstance(one, Tensor):
            found.append(one)
        elif dataclasses.is_dataclass(one):
            found += returned([getattr(one, entry.name) for entry in dataclasses.fields(one)])
    return found
