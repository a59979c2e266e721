"""Says which rank holds a parameter of another stage of a pipeline, where a program reads it and finds it empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket._program import program_line, warn

_told: set[str] = set()  # lines of the program


class TensorElsewhere(torch.Tensor):
    """A tensor of no elements, made of a parameter that another rank holds: what is computed of it is told or named."""

    home = ""  # which parameter, and who holds it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, TensorElsewhere))
            said = f"{given.home}, and has no elements on this one"
            remedy = "trainer.state_dict(), called on every rank, gives the whole model's parameters"
            try:
                found = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError) as error:
                raise RuntimeError(f"{said} ({type(error).__name__}: {error}): {remedy}") from error
            if type(found) is torch.Tensor and not found.numel():
                found = found.as_subclass(TensorElsewhere)
                found.home = given.home
            elif (line := program_line()) not in _told and any(map(_has_elements, tree_leaves(found))):
                _told.add(line)
                warn(f"what the program computes here lacks a parameter: {said}. {remedy}")
        return found


class ParameterElsewhere(TensorElsewhere, nn.Parameter):
    """A parameter that another rank holds."""


def leave_elsewhere(tensor: torch.Tensor, home: tuple[str, int] | None) -> None:
    """Free the memory of a tensor that another rank holds; of a parameter, its name and that rank are known."""
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if type(tensor) is nn.Parameter and home is not None:
        tensor.__class__ = ParameterElsewhere
        name, rank = home
        said = f"{name!r} is a parameter of another stage, which rank {rank} holds"
        tensor.home = said  # type: ignore[attr-defined]


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0
