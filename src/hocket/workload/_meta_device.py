"""What programs ask of the meta device that it lacks: values, as far as they are known, and operators in all types.

Models of packages look at what they have made themselves (are these positions those of one sequence?) and at small
inputs (does the mask hide a token?). Such tensors are computed on the CPU, too, beside the meta device.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .division import storage_of

_MOST = 1 << 20  # elements: positions and masks of a batch are smaller, activations are not asked for
_ATEN = torch.ops.aten
_UNSET = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_GROUPED = _ATEN._grouped_mm.default
_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@contextmanager
def on_meta(pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Open a block in which programs on the meta device get the values that they ask for, if these are known.

    Known are small tensors of `pairs`, what the program makes of numbers (`torch.arange`, `torch.tensor`), and what
    it computes of these alone. Grouped products (of experts) are taken in all types, as by devices: torch's check is
    one kernel's.

    Args:
        pairs: Tensors on the meta device, each with the one on another device that it was made of.
    """
    mode = _MetaDevice()
    for tensor, value in pairs:
        if isinstance(value, Tensor) and not value.is_meta and value.numel() <= _MOST:
            mode.learn(tensor, value.detach().cpu().clone())
    with mode, _WrittenOut():
        yield


class _MetaDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes on the CPU, too, what follows from known values alone, and answers by it where values are asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()  # of tensors on the meta device

    def learn(self, tensor: Any, value: Any) -> None:
        """Take a value for that of a tensor on the meta device."""
        if type(tensor) in _PLAIN and tensor.is_meta and isinstance(value, Tensor):
            self._values[tensor] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        tensors = [one for one in given if isinstance(one, Tensor)]
        on_meta = any(one.is_meta for one in tensors) or any(_is_meta(one) for one in given)
        if not on_meta or any(type(one) not in _PLAIN for one in tensors):
            return func(*args, **kwargs)
        args = self._with_places(func, args)
        asked = bool(_BY_VALUES & set(func.tags)) or func.overloadpacket is _ATEN._to_copy and _is_cpu(kwargs)
        made = None if asked else _made(func, args, kwargs)
        if asked or all(one.numel() <= _MOST for one in tree_flatten(made)[0] if isinstance(one, Tensor)):
            found = self._computed(func, args, kwargs)
            if found is not None:
                made = tree_map(_like, found) if asked and not _is_cpu(kwargs) else found if asked else made
                for one, value in zip(tree_flatten(made)[0], tree_flatten(found)[0], strict=True):
                    self.learn(one, value)
                return made
        self._forget_written(func, args, kwargs)
        return func(*args, **kwargs) if asked else made

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator gives on the CPU; None if that is not known."""
        if func.overloadpacket in _UNSET or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        try:
            return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
        except (
            KeyError,
            RuntimeError,
            NotImplementedError,
        ):  # an argument's is not known; the CPU has no such operator
            return None

    def _value(self, one: Any) -> Any:
        """Return what stands for an argument on the CPU.

        Raises:
            KeyError: its value is not known.
        """
        if isinstance(one, Tensor):
            return self._values[one] if one.is_meta else one
        return torch.device("cpu") if _is_meta(one) else one

    def _with_places(self, func: Any, args: Any) -> Any:
        """Return the arguments of an operator, those of `x[mask]` with the places at which a known mask is True."""
        if func is not _ATEN.index.Tensor:
            return args
        places: list[Tensor | None] = []
        for one in args[1]:
            if one is not None and one.dtype == torch.bool and one in self._values:
                for place in self._values[one].nonzero(as_tuple=True):
                    places.append(_like(place))
                    self.learn(places[-1], place)
            else:
                places.append(one)
        return (args[0], places)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of what an operator writes to."""
        if not func._schema.is_mutable:
            return
        named = {one.name: one for one in func._schema.arguments}
        given = [*zip(func._schema.arguments, args, strict=False), *((named[key], one) for key, one in kwargs.items())]
        for argument, one in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = {storage_of(each) for each in tree_flatten(one)[0] if isinstance(each, Tensor)}
                for each in [each for each in self._values if storage_of(each) in written]:
                    del self._values[each]


class _WrittenOut(TorchFunctionMode):
    """Has numbers that a program writes out (`torch.tensor([2, 3], device="meta")`) keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or place is None or torch.device(place).type != "meta":
            return func(*args, **kwargs)
        if isinstance(args[0] if args else kwargs["data"], Tensor):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(place)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes on the meta device."""
    if func is not _GROUPED or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    made = func(*(one.to(torch.bfloat16) for one in args[:2]), *args[2:], **kwargs)
    return made.to(kwargs.get("out_dtype") or args[0].dtype)


def _is_meta(one: Any) -> bool:
    return isinstance(one, torch.device) and one.type == "meta"


def _is_cpu(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") == torch.device("cpu")


def _like(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
