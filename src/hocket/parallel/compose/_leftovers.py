"""Finds tensors of the sample that a model's code has put somewhere, where a stage of another rank would put them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Leftovers(TorchFunctionMode):
    """Notes the tensors that functions make while it is on; those that are there long after are kept by the program."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self._made += [weakref.ref(one) for one in tree_leaves(result) if type(one) is torch.Tensor]
        return result

    def there(self) -> dict[int, torch.Tensor]:
        """Return those that are there still, by their ids."""
        self._made = [one for one in self._made if one() is not None]
        return {id(tensor): tensor for one in self._made if (tensor := one()) is not None}
