"""Says which rank holds a parameter or buffer of another stage of a pipeline, where a program reads it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves, tree_map

from hocket._program import program_frame, program_line, warn

_SHAPES: Final = frozenset(("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "nbytes", "__len__"))
_COPIES: Final = frozenset(("data", "detach", "clone", "cpu"))
_OPENED: Final = frozenset(("numpy", "__array__", "tolist", "equal", "allclose"))
_METHODS: Final = (torch._tensor.__file__, torch.overrides.__file__)
_told: set[str] = set()  # lines of the program


class TensorElsewhere(torch.Tensor):
    """A tensor of no elements, made of one that another rank holds: what is computed of it is told or named.

    A program that asks for its shape, say to count the model's parameters, gets the whole's. What it writes of that
    shape (`p.copy_(torch.zeros(p.shape))`) is written on the rank that holds it.
    """

    home = ""  # which parameter or buffer, and who holds it
    whole: torch.Tensor | None = None  # on the meta device, as it is there

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, caller = _name(func), _caller()
        with torch._C.DisableTorchFunctionSubclass():
            given = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, TensorElsewhere))
            if name in _SHAPES and given.whole is not None and program_frame() is caller:
                return func(*tree_map(_whole, tuple(args)), **tree_map(_whole, kwargs or {}))
            said = f"{given.home}, and has no elements on this one"
            try:
                found = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError) as error:
                if name.endswith("_") and not name.endswith("__") and _fits(func, args, kwargs or {}):
                    return args[0]
                raise RuntimeError(f"{said} ({type(error).__name__}: {error}): {_REMEDY}") from error
            if type(found) is torch.Tensor and not found.numel():
                found = found.as_subclass(TensorElsewhere)
            if isinstance(found, TensorElsewhere):
                found.home = given.home
                found.whole = given.whole if name in _COPIES else found.whole
            elif any(map(_has_elements, tree_leaves(found))) or (name in _OPENED and program_frame() is caller):
                _tell(f"what the program computes here lacks a tensor: {said}. {_REMEDY}")
            elif name == "grad" and found is None and _sums_gradients(caller):
                _tell(f"gradients that the program reads here are not all: {given.home}, with its gradient. {_NORM}")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Be copied as what it is: torch copies subclasses of tensors only where they have memory."""
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copy = self.detach().clone().requires_grad_(self.requires_grad)
            copy.__class__ = type(self)
            vars(copy).update(vars(self))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as what it is on this rank, so that a file needs no class of this package."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ParameterElsewhere(TensorElsewhere, nn.Parameter):
    """A parameter that another rank holds."""


_REMEDY: Final = "trainer.state_dict(), called on every rank, gives the whole model's parameters and buffers"
_NORM: Final = "With clip_norm in the plan (inf clips nothing), trainer.grad_norm is the norm of all"


def leave_elsewhere(tensor: torch.Tensor, home: tuple[str, int] | None) -> None:
    """Free the memory of a tensor that another rank holds, if it is known by its name and that rank."""
    kind = {nn.Parameter: ParameterElsewhere, torch.Tensor: TensorElsewhere}.get(type(tensor))
    shape = None if kind is None else tensor.shape
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if kind is not None and shape is not None and home is not None:
        tensor.__class__ = kind  # type: ignore[assignment]
        name, rank = home
        word = "parameter" if kind is ParameterElsewhere else "buffer"
        tensor.home = f"{name!r} is a {word} of another stage, which rank {rank} holds"  # type: ignore[attr-defined]
        tensor.whole = torch.empty(shape, dtype=tensor.dtype, device="meta")  # type: ignore[attr-defined]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name != "__get__":
        return str(name)
    return str(getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__)


def _caller() -> FrameType | None:
    """Return who has called torch: behind its methods of tensors that are Python's own, as `len`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    return frame


def _whole(value: Any) -> Any:
    return value.whole if isinstance(value, TensorElsewhere) and value.whole is not None else value


def _fits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the first argument is a tensor elsewhere, which the call would change in place if it were here."""
    if not args or not isinstance(args[0], TensorElsewhere) or args[0].whole is None:
        return False
    try:
        func(*tree_map(_meta, tuple(args)), **tree_map(_meta, kwargs))
    except (RuntimeError, IndexError):
        return False
    return True


def _meta(value: Any) -> Any:
    return _whole(value).detach().to("meta") if isinstance(value, torch.Tensor) else value


def _sums_gradients(caller: FrameType | None) -> bool:
    return caller is not None and (caller.f_code.co_filename == clip_grad.__file__ or program_frame() is caller)


def _tell(message: str) -> None:
    if (line := program_line()) not in _told:
        _told.add(line)
        warn(message)


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0
