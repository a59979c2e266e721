"""Says so where a program reads a number, as a norm, of a gradient or weight of which a rank has a part alone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Final

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
# What is a part where its other argument is a number, or another one's same part.
_SAME_OF_TWO: Final = frozenset((
    "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__",
    "lt", "__lt__", "le", "__le__", "gt", "__gt__", "ge", "__ge__", "eq", "__eq__", "ne", "__ne__",
))  # fmt: skip
_OURS: Final = f"{__name__.partition('.')[0]}."
_STATE_DICT: Final = torch.nn.Module._save_to_state_dict.__code__
_USING: Final = ("torch.nn.utils.", "torch.optim.")  # gradients; `model.to` and exports only take them along
_NEW_PARAMETER: Final = torch.nn.Parameter.__new__.__code__
_told: set[str] = set()  # lines of the program


class GradientPart(torch.Tensor):
    """What a rank has of a gradient, between the Trainer's steps: numbers that are computed of it are told."""

    what: ClassVar[str] = "gradient"
    remedy: ClassVar[str] = "With clip_norm in the plan (inf clips nothing), trainer.grad_norm is the norm of all"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return _plainly(func, args, kwargs)
        return _called(cls, sys._getframe(1), func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain tensor, so that a file needs no class of this package."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Be copied as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copy = self.as_subclass(torch.Tensor).detach().clone()
        return copy

    def __repr__(self, **given: Any) -> Any:  # type: ignore[override]
        """Be shown as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__repr__(**given)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        """Be a plain parameter once `torch.nn.Parameter` makes one of it, which sets this attribute."""
        if name == "_is_param":
            _become(self, torch.nn.Parameter)
        else:
            super().__setattr__(name, value)


class WeightPart(GradientPart):
    """What is computed, element by element, of a weight of which a rank has a part."""

    what = "weight"
    remedy = "trainer.state_dict(), called on every rank, has whole weights"


class WatchedParameter(torch.nn.Parameter):
    """A parameter between the Trainer's steps that tells what a program does with it; its copies are plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return _plainly(func, args, kwargs)
        frame = sys._getframe(1)
        if func is torch.Tensor.detach and frame.f_code is _NEW_PARAMETER:  # which asks for the same class
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args).as_subclass(cls)
        return cls._called(frame, func, args, kwargs)

    @classmethod
    def _called(cls, frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain parameter."""
        with _plain(self):
            return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Be copied as a plain parameter."""
        with _plain(self):
            return self.__deepcopy__(memo)

    def __repr__(self, **given: Any) -> Any:  # type: ignore[override]
        """Be shown as a plain parameter."""
        with _plain(self):
            return self.__repr__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        """See `GradientPart`."""
        if name == "_is_param":
            _become(self, torch.nn.Parameter)
        else:
            super().__setattr__(name, value)


class ParameterPart(WatchedParameter):
    """What a rank has of a weight: numbers that are computed of it are told."""

    @classmethod
    def _called(cls, frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        return _called(WeightPart, frame, func, args, kwargs)


class FreedGradient(WatchedParameter):
    """A parameter whose gradient the step has freed: that a program looks for it is told."""

    @classmethod
    def _called(cls, frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
        found = _plainly(func, args, kwargs)
        if getattr(func, "__self__", None) is not torch.Tensor.grad:
            return found
        if func.__name__ == "__set__" or frame.f_code.co_name == "zero_grad":  # none is what there is by any plan now
            _become(args[0], torch.nn.Parameter)
        elif found is None and args[0].requires_grad and _uses_gradients(frame) and not _works_for_us(frame):
            _tell_once(
                "the program looks for gradients after a step, and by this plan (shard = 'gradients') none is kept: "
                f"those it finds are None, and a norm of all is 0. {GradientPart.remedy}"
            )
        return found


class MarkedParts:
    """Makes weights and gradients of parts such as tell of it after a step, and plain again before the next one.

    So are gradients of what is cut, in the program's own back-propagation between steps. The model's forward has plain
    weights, where some are cut.

    Args:
        model: The model.
        cut: What this rank has a part of.
        shared: What it has whole, while the Trainer leaves it a part of the gradients' averages.
        freed: What it has whole, while the Trainer leaves no gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cut: Iterable[torch.nn.Parameter],
        shared: Iterable[torch.nn.Parameter],
        freed: Iterable[torch.nn.Parameter],
    ) -> None:
        cut = list(cut)
        self._parameters = [*cut, *shared]
        self._cut = [one for one in cut if type(one) is torch.nn.Parameter]  # no DTensor
        self._marked = False  # whether weights are
        self._freed = list(freed)
        self._awaited: list[torch.nn.Parameter] = []  # of these, but where the program itself has said none
        self._modules = list(model.modules()) if self._cut or self._freed else []
        self._between = False
        for one in cut:
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        if self._cut:
            model.register_forward_pre_hook(_Around(self._clear_weights), prepend=True)
            model.register_forward_hook(_Around(self._mark_weights), always_call=True)

    def mark(self) -> None:
        """Mark the weights, and the gradients that are there."""
        self._between = True
        for one in self._parameters:
            self._mark(one)
        self._mark_weights()  # last: a marked one is slower to tell its gradient

    def clear(self) -> None:
        """Make them plain again."""
        self._between = False
        self._clear_weights()
        for one in self._parameters:
            if type(gradient := one.grad) is GradientPart:
                _become(gradient, torch.Tensor)

    def step(self) -> None:
        """Take notice of a step, which leaves gradients by other plans."""
        self._awaited = self._freed

    def _mark_weights(self) -> None:
        # What is compiled would be compiled once more for another class.
        if self._between and not (self._marked or any(map(_is_compiled, self._modules))):
            for one in self._cut:
                _become(one, ParameterPart)
            for one in self._awaited:
                _become(one, FreedGradient)
            self._marked = True

    def _clear_weights(self) -> None:
        if self._marked:
            self._awaited = [one for one in self._awaited if type(one) is FreedGradient]
            for one in (*self._cut, *self._awaited):
                _become(one, torch.nn.Parameter)
            self._marked = False

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._between:
            self._mark(parameter)

    def _mark(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is torch.Tensor:
            _become(gradient, GradientPart)


class _Around:
    """A hook around the model's forward; it neither keeps the marks alive, nor is copied or saved with the model."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = weakref.WeakMethod(call)

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (call := self._call()) is not None:
            call()

    def __reduce__(self) -> Any:
        return _hook_of_none, ()


def _hook_of_none() -> Any:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Stand in the place of a hook that was copied with its model."""


def _become(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    object.__setattr__(tensor, "__class__", kind)  # past their own, which is slow


@contextmanager
def _plain(parameter: WatchedParameter) -> Iterator[None]:
    kind = type(parameter)
    _become(parameter, torch.nn.Parameter)
    try:
        yield
    finally:
        _become(parameter, kind)


def _is_compiled(module: torch.nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module.__dict__["_modules"]


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _called(part: type[GradientPart], frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch with parts, mark what is a part again, and tell of numbers."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **(kwargs or {}))
        if type(found) is torch.Tensor:
            if (name in _SAME or (name in _SAME_OF_TWO and _are_one_part(args))) and not _is_ours(frame):
                return found.as_subclass(part)
        elif func is torch.autograd.grad:
            pairs = zip(found, args[1], strict=True)
            return tuple(
                one.as_subclass(GradientPart) if type(one) is torch.Tensor and type(of) is ParameterPart else one
                for one, of in pairs
            )
    if name in ("zero_", "_foreach_zero_"):  # the program's own come here next
        for one in _tensors(args):
            if type(one) is GradientPart:
                _become(one, torch.Tensor)
    if name in _OPENED or (name in _NUMBERS and all(one.numel() == 1 for one in _tensors(found))):
        _tell(part, frame)
    return found


def _tensors(found: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


def _are_one_part(args: Any) -> bool:
    return len({one.shape for one in _tensors(args) if one.ndim}) == 1


def _is_ours(frame: FrameType) -> bool:
    """Return whether this package works with a part, or torch makes a model's state dict, of which more is said."""
    return str(frame.f_globals.get("__name__")).startswith(_OURS) or frame.f_code is _STATE_DICT


def _uses_gradients(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(_USING) or not name.startswith("torch.")


def _works_for_us(frame: FrameType | None) -> bool:
    """Return whether torch or Keras, where it works in this frame, does so for this package."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "keras.")):
        frame = frame.f_back
    return frame is None or _is_ours(frame)


def _tell(part: type[GradientPart], frame: FrameType) -> None:
    if not _works_for_us(frame):
        what = part.what
        _tell_once(
            f"the program computes a number (a norm, say) of a {what} of which this rank has a part alone: by this "
            f"plan it is not the whole {what}'s. {part.remedy}"
        )


def _tell_once(what: str) -> None:
    if (line := program_line()) not in _told:
        _told.add(line)
        warn(what)
