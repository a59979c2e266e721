"""What a program sees of a parameter that has no memory yet: a tensor on the meta device that can be written to.

The meta device would forget what is written. A write is done to the parameter's numbers instead, by the ledger that
makes them (`_ledger`), so that weights can be initialised anew, loaded or changed after `hocket.deferred` has
returned, too.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_LOADING = "_load_from_state_dict"
_NO_WRITES = frozenset({"requires_grad_", "share_memory_", "rename_", "detach_"})
_REFUSED = frozenset({"resize_", "resize_as_", "set_"})
_INSIDE = "Do it in the function that hocket.deferred is given, where it is done to one tensor at a time"
_UNREAD = (
    "a deferred model has no numbers to move or read before the Trainer has divided it: build it on its device "
    '(with torch.device("cuda"): model = hocket.deferred(build)), and read in the function that hocket.deferred is '
    "given, or after the Trainer is made"
)
_IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow"))})


class DeferredValue(torch.Tensor):
    """A tensor without memory, on the meta device: a parameter, a view of one, or what was made of such tensors."""

    hollow: torch.Tensor  # the same of the tensor that the ledger fills
    ledger: Any  # that does so

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do to the numbers what makes or changes some, and ask the meta device for everything else."""
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code
        if func == _IS_META and (
            caller.co_filename == nn.init.__file__  # which leaves alone what is on the meta device
            or (caller.co_filename == nn.modules.module.__file__ and caller.co_name == _LOADING)  # nothing is loaded
        ):
            return False
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        lost = any(not isinstance(one, DeferredValue) and one.is_meta for one in given)
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_DATA:
                return _set_data(args[0], args[1])
            if _writes(func, kwargs):
                return _written(func, args, kwargs, lost)
            grad = torch.is_grad_enabled() and any(one.requires_grad for one in given)
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, TypeError) as error:  # it reads numbers, or was given some
                if lost or not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
                    if "meta" not in str(error):
                        raise
                    raise RuntimeError(_UNREAD) from error
            else:
                made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
                if lost or all(any(one is other for other in given) for one in made):
                    return result
                grad = any(one.requires_grad for one in made)
            with torch.no_grad():
                found = _on_numbers(func, args, kwargs, adopts=True)
            for one in tree_leaves(found):
                if isinstance(one, DeferredValue) and one.is_floating_point():
                    one.requires_grad_(grad)
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the same of a tensor with the numbers that this one is to have."""
        if id(self) not in memo:
            made = self.detach().clone()
            memo[id(self)] = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]


def deferred_value(hollow: torch.Tensor, ledger: Any) -> DeferredValue:
    """Return what a program sees of a tensor that a ledger fills."""
    with torch._C.DisableTorchFunctionSubclass():
        shown = _on_meta(hollow).as_subclass(DeferredValue)
        shown.requires_grad_(hollow.requires_grad)
    shown.hollow, shown.ledger = hollow, ledger
    if isinstance(hollow, nn.Parameter):
        shown._is_param = True  # by which torch knows those of other classes
    return shown


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _set_data(changed: DeferredValue, value: torch.Tensor) -> None:
    """Give a tensor other data, which need not have its type or size: numbers, or what was made of some."""
    if isinstance(value, DeferredValue):
        hollow, changed.ledger = value.hollow.detach(), value.ledger
    elif value.is_meta:
        raise _unknown("data = ...")
    else:
        with changed.ledger, changed.ledger.adopting():
            hollow = value.detach().clone()
    torch.Tensor.data.__set__(changed, _on_meta(hollow))  # type: ignore[attr-defined]
    changed.hollow = nn.Parameter(hollow, changed.requires_grad) if isinstance(changed, nn.Parameter) else hollow


def _writes(func: Any, kwargs: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    name = str(getattr(func, "__name__", ""))
    if kwargs.get("out") is not None or name in _IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES


def _written(func: Any, args: Any, kwargs: Any, lost: bool) -> Any:
    name = str(getattr(func, "__name__", func))
    if lost:
        raise _unknown(name)
    if name in _REFUSED:
        raise RuntimeError(f"a deferred parameter cannot be changed so: {name} changes its memory. {_INSIDE}")
    return _on_numbers(func, args, kwargs)


def _unknown(name: str) -> RuntimeError:
    return RuntimeError(
        f"a deferred parameter cannot be changed so: {name} has numbers of other tensors that are not there. {_INSIDE}"
    )


def _on_numbers(func: Any, args: Any, kwargs: Any, *, adopts: bool = False) -> Any:
    """Return what a function gives for the tensors with numbers, in memory meanwhile; if it adopts, results are not."""
    shown = {id(one.hollow): one for one in tree_leaves((args, kwargs)) if isinstance(one, DeferredValue)}
    ledgers = list({id(one.ledger): one.ledger for one in shown.values()}.values())  # each is entered once
    if any(ledger.taken for ledger in ledgers):
        raise RuntimeError(
            "a tensor that was made of a deferred model's parameters has no numbers any more, since the Trainer has "
            "taken theirs: make it again of the model's parameters as they are now, or keep it in the model"
        )

    def numbers(one: Any) -> Any:
        return one.hollow if isinstance(one, DeferredValue) else one

    def seen(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or id(one) in shown:
            return shown.get(id(one), one)
        ledger = next((ledger for ledger in ledgers if ledger.of(one)), None)
        if ledger is None and adopts and one.numel() in {other.numel() for other in shown.values()}:
            ledger = ledgers[-1]  # a parameter in another type stays one, small as it may be
        return one if ledger is None else deferred_value(one, ledger)

    with ExitStack() as entered:
        for ledger in ledgers:
            entered.enter_context(ledger)
        if adopts:
            entered.enter_context(ledgers[-1].adopting())
        return tree_map(seen, func(*tree_map(numbers, args), **tree_map(numbers, kwargs)))
