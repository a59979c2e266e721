"""Runs a user's forward on parts while its code speaks of full sizes.

Where a forward says `q.view(B, T, self.n_head, C // self.n_head)`, this rank has a part of the heads only. Inside
such modules torch functions are looked at: shapes are told as those of the full tensor, and sizes that are given for
it become those of the part, by the same rules by which the model was examined. Tensors stay plain ones; how they are
cut is noted on them in an attribute, by the layers that make them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hocket.workload.division import (
    ALL_RULES,
    NO_ANSWER,
    CannotSplit,
    Operand,
    Part,
    Site,
    Split,
    cut,
    function_name,
    leaves,
    mapped,
)

from ...mesh import World
from ._functions import copy_to
from ._numbers import own_numbers

_NOTE = "_hocket_split"
# What layers with weights call for themselves: their weights are parts already.
_LAYERS = frozenset(
    ["linear", "batch_norm", "group_norm", "layer_norm", "rms_norm", "prelu", "embedding"]
    + [f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)]
)


def note(tensor: torch.Tensor, split: Split | None) -> torch.Tensor:
    """Writes on the tensor how it is cut; returns it."""
    if split is not None:
        setattr(tensor, _NOTE, split)
    elif hasattr(tensor, _NOTE):
        delattr(tensor, _NOTE)
    return tensor


def noted(tensor: torch.Tensor) -> Split | None:
    """How the tensor is cut, if that was noted."""
    return getattr(tensor, _NOTE, None)


_local = threading.local()


@contextmanager
def as_it_is() -> Iterator[None]:
    """In the block this thread's torch functions are called as they are: the code is ours, and means parts."""
    _local.paused = getattr(_local, "paused", 0) + 1
    try:
        yield
    finally:
        _local.paused -= 1


class Interpreter(TorchFunctionMode):
    """Looks at torch functions while a module's forward runs.

    Args:
        world: the ranks that share what is cut.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_local, "paused", 0) or not any(
            isinstance(x, torch.Tensor) and _NOTE in x.__dict__ for x in leaves((args, kwargs))
        ):
            return func(*args, **kwargs)
        name = function_name(func)
        if name in _LAYERS:
            result = func(*args, **kwargs)
            return note(result, args[0].__dict__.get(_NOTE))
        rule = ALL_RULES.get(name)
        if rule is None:
            raise CannotSplit(f"{name} is given a tensor of which every rank has a part")
        site = Site(name, list(mapped(self._operand, args)), mapped(self._operand, kwargs), self._world.size)
        splits = rule(site)
        if site.answer is not NO_ANSWER:
            return site.answer
        if site.aware:
            args, kwargs = mapped(self._tensor, site.args), mapped(self._tensor, site.kwargs)
        if site.random:
            device = next(o.tensor.device for o in site.operands())
            with own_numbers(self._world, device):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        if splits is None or isinstance(splits, Split):
            splits = [splits] * len(made)
        for tensor, split in zip(made, splits, strict=True):
            note(tensor, split)
        return result

    def _operand(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        split = leaf.__dict__.get(_NOTE)
        shape = tuple(leaf.shape)
        if split is not None:
            shape = (*shape[: split.dim], split.size, *shape[split.dim + 1 :])
        return Operand(shape, split, leaf.requires_grad, False, leaf)

    def _tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, Part):
            (full,) = copy_to(self._world, leaf.operand.tensor)
            return cut(full, leaf.split, self._world.rank, self._world.size)
        if not isinstance(leaf, Operand):
            return leaf
        if leaf.split is None and leaf.grad:
            return copy_to(self._world, leaf.tensor)[0]
        return leaf.tensor


class Interpretation:
    """How the forward of one module is interpreted.

    Args:
        world: the ranks that share what is cut.
        given: how arguments are cut, by their places among all.
    """

    def __init__(self, world: World, given: dict[int, Split]) -> None:
        self._world = world
        self._given = given

    @contextmanager
    def running(self, args: Any, kwargs: Any) -> Iterator[None]:
        """In the block torch functions are looked at; `args` and `kwargs` are what the forward is given."""
        for place, leaf in enumerate(leaves((args, kwargs)) if self._given else ()):
            split = self._given.get(place)
            if split is not None and isinstance(leaf, torch.Tensor) and noted(leaf) is None:
                # The size may be another than the sample's: a sequence's, say.
                alone = len(split.segments) == 1
                note(leaf, Split(split.dim, (leaf.shape[split.dim] * self._world.size,)) if alone else split)
        if getattr(_local, "running", False):  # once is enough
            yield
            return
        _local.running = True
        try:
            with Interpreter(self._world):
                yield
        finally:
            _local.running = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Interpretation:
        return self


class InterpretedModule(nn.Module):
    """Has the forward of a user's module interpreted; stands before the module's own class."""

    interpretation: Interpretation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        with self.interpretation.running(args, kwargs):
            return super().forward(*args, **kwargs)


def interpret(module: Any, interpretation: Interpretation) -> Callable[[], None]:
    """Has a module's forward interpreted, wherever it is called from; returns what puts it back."""
    old = type(module)
    module.interpretation = interpretation
    replaced = module.__dict__.get("forward")
    if replaced is None:
        # It stays an instance of its class, and whoever copies it copies this too.
        module.__class__ = type(
            old.__name__, (InterpretedModule, old), {"__module__": __name__, "__doc__": old.__doc__}
        )
    else:

        @functools.wraps(replaced)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with interpretation.running(args, kwargs):
                return replaced(*args, **kwargs)

        module.__dict__["forward"] = forward

    def undo() -> None:
        module.__class__ = old
        del module.interpretation
        if replaced is not None:
            module.__dict__["forward"] = replaced

    return undo
