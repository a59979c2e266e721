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

from ._kernels import FUSED
from .division import storage_of

_MOST = 1 << 20  # elements: positions and masks of a batch are smaller, activations are not asked for
_ATEN = torch.ops.aten
_UNSET = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_GROUPED = _ATEN._grouped_mm.default
_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_FINITE = {torch.isfinite: True, torch.isinf: False, torch.isnan: False}
_FINITE |= {getattr(Tensor, func.__name__): value for func, value in _FINITE.items()}
_OVER_ALL = {_ATEN.all.default, _ATEN.any.default}
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
    with mode, _Program(mode):
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

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor on the meta device, None if it is not known."""
        found: Tensor | None = self._values.get(tensor)
        return found

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
        return _made(func, args, kwargs) if asked else made

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator gives on the CPU; None if that is not known."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        try:
            values = tree_map(self._value, args)
            if func in _OVER_ALL and not any(values[0].stride()):  # one value, as often as there are activations
                values = [values[0].flatten()[:1]]
            found = func(*values, **tree_map(self._value, kwargs))
            return found.zero_() if func.overloadpacket in _UNSET else found  # which a program fills
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


class _Program(TorchFunctionMode):
    """Has numbers that a program writes out keep their values, and takes all activations for finite."""

    def __init__(self, device: _MetaDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = _moved_to_meta(func, args, kwargs or {})
        if func is Tensor.numpy and args[0].is_meta:
            value = self._device.value_of(args[0])
            return func(args[0] if value is None else value.clone(), *args[1:], **kwargs)
        if func in (torch.tensor, torch.as_tensor):
            place, data = kwargs.get("device"), args[0] if args else kwargs["data"]
            if place is not None and torch.device(place).type == "meta" and not isinstance(data, Tensor):
                return func(*args, **{**kwargs, "device": "cpu"}).to(place)
        elif func is Tensor.__getitem__ and args[0].is_meta:  # torch makes a tensor without values of `[[0, -1]]`
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            return func(args[0], tuple(torch.tensor(one) if _numbers(one) else one for one in places))
        elif func is torch._C._VariableFunctions._pack_padded_sequence and args[1].is_meta:
            lengths = self._device.value_of(args[1])  # which are on the CPU wherever the sequences are
            return func(args[0], args[1] if lengths is None else lengths, *args[2:])
        elif func in _FINITE:
            made = func(*args, **kwargs)
            self._device.learn(made, torch.tensor(_FINITE[func]).expand(made.shape))
            return made
        return func(*args, **kwargs)


def _moved_to_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return a call in which the meta device stands for a GPU: a program that goes to one by name is planned for it."""
    if func is Tensor.cuda:
        return Tensor.to, (args[0], "meta"), {}
    if func is Tensor.to and len(args) > 1 and _is_gpu(args[1]):
        args = (args[0], "meta", *args[2:])
    if _is_gpu(kwargs.get("device")):
        kwargs = {**kwargs, "device": "meta"}
    return func, args, kwargs


def _is_gpu(one: Any) -> bool:
    return str(one).partition(":")[0] == "cuda" if isinstance(one, str | torch.device) else False


def _numbers(one: Any) -> bool:
    return isinstance(one, list) and bool(one) and all(type(each) in (int, bool) for each in one)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes on the meta device."""
    if func is _GROUPED and args[0].dtype != torch.bfloat16:
        made = func(*(one.to(torch.bfloat16) for one in args[:2]), *args[2:], **kwargs)
        return made.to(kwargs.get("out_dtype") or args[0].dtype)
    if func.overloadpacket is _ATEN._ctc_loss:  # which torch has for devices only
        steps, samples = args[0].shape[:2]
        most = args[1].shape[1] if args[1].dim() == 2 else -(-args[1].shape[0] // samples)
        return args[0].new_empty(samples), args[0].new_empty(samples, steps, 2 * most + 1)
    if func.overloadpacket is _ATEN._ctc_loss_backward:
        return torch.empty_like(args[1])
    if func.overloadpacket is FUSED and args[2].shape[-1] != args[0].shape[-1]:  # torch gives the queries' shape
        query, size = args[0], (*args[0].shape[:-1], args[2].shape[-1])
        order = sorted(range(query.dim()), key=query.stride, reverse=True)
        made = torch.empty_permuted(size, order, dtype=query.dtype, device=query.device)
        return made, *func(*args, **kwargs)[1:]
    return func(*args, **kwargs)


def _is_meta(one: Any) -> bool:
    return isinstance(one, torch.device) and one.type == "meta"


def _is_cpu(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") == torch.device("cpu")


def _like(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
