"""The parts of a module at which a chain can be cut, and small things that capturing needs."""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hocket.sharding import as_local

from ._share import WorkloadError

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Unit:
    name: str
    module: nn.Module


def units_of(model: nn.Module) -> list[Unit]:
    """Return the parts at which a chain can be cut.

    Those are what stands in the model, in its sequences and lists, and in modules that hold a list of blocks of one
    class: an encoder in a model with a head, say. Blocks themselves stay whole.
    """
    found: list[Unit] = []

    def visit(module: nn.Module, name: str, block: bool) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            chain = isinstance(child, nn.Sequential | nn.ModuleList)
            if (chain and len(list(child.children()))) or (not block and not chain and _holds_blocks(child)):
                visit(child, inner, block or chain)
            else:
                found.append(Unit(inner, child))

    visit(model, "", False)
    return found or [Unit("model", model)]


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a list of several modules of one class is in a module, outside of other lists and sequences."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child) > 1 and len({type(one) for one in child}) == 1:
                return True
        elif not isinstance(child, nn.Sequential) and _holds_blocks(child):
            return True
    return False


@contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def followed(units: Sequence[Unit], entered: Callable[[int], None], derived: Callable[[int], None]) -> Iterator[None]:
    """Open a block that hears when each unit's forward pass begins, and when the gradient of its output is there."""

    def left(index: int, output: Any) -> None:
        for one in tree_flatten(output)[0]:
            if isinstance(one, Tensor) and one.requires_grad:
                with as_local():  # it looks at no gradient: a shard's will do
                    one.register_hook(lambda _: derived(index))  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            module = unit.module
            stack.enter_context(hooked(module.register_forward_pre_hook(lambda *_, i=index: entered(i))))
            stack.enter_context(hooked(module.register_forward_hook(lambda _m, _a, out, i=index: left(i, out))))
        yield


def samples(batch: Any) -> int:
    for one in tree_flatten(batch)[0]:
        if isinstance(one, Tensor) and one.dim():
            return int(one.shape[0])
    rule = f"the sample, of type {type(batch).__name__}, holds no tensor with a dimension that counts samples"
    remedy = "give a batch: a tensor, or a tuple, a dict or a dataclass of such"
    raise WorkloadError(f"capture: {rule}; {remedy}")


def entries(sample: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a sample as torch's trees have it, and a function that makes one of the sample's type of such.

    Those hold no mappings but dictionaries (a tokenizer's `BatchEncoding` is another), and no dataclasses.
    """
    leaves = tree_flatten(sample)[0]
    if len(leaves) == 1 and leaves[0] is sample:
        if isinstance(sample, MutableMapping):
            return dict(sample), lambda found: _copy_with(sample, found, operator.setitem)
        if dataclasses.is_dataclass(sample):
            parts = {entry.name: getattr(sample, entry.name) for entry in dataclasses.fields(sample)}
            return parts, lambda found: _copy_with(sample, found, object.__setattr__)
    return sample, lambda found: found


def _copy_with(sample: Any, entries: Mapping[str, Any], put: Callable[[Any, str, Any], None]) -> Any:
    made = copy.copy(sample)
    for key, value in entries.items():
        put(made, key, value)
    return made


def returned(result: Any) -> list[Tensor]:
    """Return the tensors in what a model returns: in tuples, lists, dictionaries and dataclasses."""
    found = []
    for one in tree_flatten(result)[0]:
        if isinstance(one, Tensor):
            found.append(one)
        elif dataclasses.is_dataclass(one):
            found += returned([getattr(one, entry.name) for entry in dataclasses.fields(one)])
    return found
