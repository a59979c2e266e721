"""Runs a user's forward on parts while its code speaks of full sizes.

Where a forward says `q.view(B, T, self.n_head, C // self.n_head)`, this rank has a part of the heads only. Inside
such modules torch functions are looked at: shapes are told as those of the full tensor, and sizes that are given for
it become those of the part, by the same rules by which the model was examined. Tensors stay plain ones; how they are
cut is noted on them in an attribute, by the layers that make them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._world import World
from ._call import NO_ANSWER, Operand, Part, Site
from ._functions import copy_to
from ._numbers import own_numbers
from ._record import function_name, leaves, mapped
from ._rules import RULES
from ._shape_rules import SHAPE_RULES
from ._split import CannotSplit, Split, cut

ALL_RULES = {**RULES, **SHAPE_RULES}
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


class Interpreted:
    """Has a module's forward interpreted, by hooks on it.

    Args:
        module: whose.
        world: the ranks that share what is cut.
        given: how arguments are cut, by their places among all.
    """

    def __init__(self, module: nn.Module, world: World, given: dict[int, Split]) -> None:
        self._world = world
        self._given = given
        self._running: list[Interpreter | None] = []
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Has it run as it is."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._given:
            for place, leaf in enumerate(leaves((args, kwargs))):
                split = self._given.get(place)
                if split is not None and isinstance(leaf, torch.Tensor) and noted(leaf) is None:
                    # The size may be another than the sample's: a sequence's, say.
                    alone = len(split.segments) == 1
                    note(leaf, Split(split.dim, (leaf.shape[split.dim] * self._world.size,)) if alone else split)
        # Once is enough: inside another such module functions are looked at already.
        running = None if getattr(_local, "running", 0) else Interpreter(self._world)
        self._running.append(running)
        if running is not None:
            _local.running = 1
            running.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, *_: Any) -> None:
        running = self._running.pop() if self._running else None
        if running is not None:
            _local.running = 0
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Interpreted:
        return self
