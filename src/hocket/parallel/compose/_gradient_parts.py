"""Says so where a program reads a number, as a norm, of a gradient of which a rank has a part alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from hocket._program import program_line, warn

_NUMBERS: Final = frozenset((
    "norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "linalg_matrix_norm", "matrix_norm", "_foreach_norm",
    "sum", "mean", "std", "var", "max", "min", "amax", "amin", "median", "quantile", "kthvalue", "count_nonzero",
))  # fmt: skip
_OPENED: Final = frozenset(("histc", "histogram", "numpy", "__array__", "tolist"))
_SAME: Final = frozenset((
    "detach", "data", "abs", "square", "pow", "__pow__", "float", "double", "cpu", "to", "flatten", "ravel", "view",
    "reshape", "cat", "concat", "concatenate",
))  # fmt: skip
_told: set[str] = set()  # lines of the program


class GradientPart(torch.Tensor):
    """What a rank has of a gradient, between the Trainer's steps: numbers that are computed of it are told."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if name in _SAME and type(found) is torch.Tensor:
                return found.as_subclass(GradientPart)
        if name in ("zero_", "_foreach_zero_"):  # the program's own come here next
            for one in _tensors(args):
                one.__class__ = torch.Tensor if type(one) is GradientPart else type(one)
        if name in _OPENED or (name in _NUMBERS and all(one.numel() == 1 for one in _tensors(found))):
            _tell()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain tensor, so that a file needs no class of this package."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Be copied as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copy = self.as_subclass(torch.Tensor).detach().clone()
        return copy


class MarkedGradients:
    """Makes gradients of parts `GradientPart` after a step, and plain again before the next one.

    So are those of what is cut, in the program's own back-propagation between steps.

    Args:
        cut: What this rank has a part of.
        shared: What it has whole, while the Trainer leaves it a part of the gradients' averages.
    """

    def __init__(self, cut: Iterable[torch.nn.Parameter], shared: Iterable[torch.nn.Parameter]) -> None:
        cut = list(cut)
        self._parameters = [*cut, *shared]
        self._marked: list[torch.Tensor] = []
        self._between = False
        for one in cut:
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Mark the gradients that are there."""
        self._between = True
        for one in self._parameters:
            self._mark(one)

    def clear(self) -> None:
        """Make them plain tensors again."""
        self._between = False
        for one in self._marked:
            one.__class__ = torch.Tensor
        self._marked = []

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._between:
            self._mark(parameter)

    def _mark(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is torch.Tensor:
            gradient.__class__ = GradientPart
            self._marked.append(gradient)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


def _tell() -> None:
    if (line := program_line()) not in _told:
        _told.add(line)
        warn(
            "the program computes a number (a norm, say) of a gradient of which this rank has a part alone: by this "
            "plan it is not the whole gradient's. With clip_norm in the plan (inf clips nothing), trainer.grad_norm is "
            "the norm of all",
        )
