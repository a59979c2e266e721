"""What a program sees of a parameter that has no memory yet: a tensor on the meta device that can be written to.

The meta device would forget what is written. A write is done to the parameter's numbers instead, by the ledger that
makes them (`_deferred`), so that weights can be initialised anew, loaded or changed after `hocket.deferred` has
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
_IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow"))})


class DeferredValue(torch.Tensor):
    """A parameter without memory, or a view of one, on the meta device.

    Attributes:
        hollow: The same of the tensor that the ledger fills.
        ledger: That does so.
    """

    hollow: torch.Tensor
    ledger: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what writes to the numbers, and everything else on the meta device."""
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code
        if func == _IS_META and caller.co_filename == nn.modules.module.__file__ and caller.co_name == _LOADING:
            return False  # it would say that nothing is loaded
        initialising = caller.co_filename == nn.init.__file__  # which leaves alone what is on the meta device
        if initialising and func == _IS_META:
            return False
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = [one for one in given if isinstance(one, DeferredValue) and hasattr(one, "hollow")]
        with torch._C.DisableTorchFunctionSubclass():
            if known and _writes(func, kwargs):
                return _written(func, args, kwargs, given)
            if func == _SET_DATA and isinstance(args[0], DeferredParameter):
                return _set_data(args[0], args[1])
            numbers = None
            if known and initialising:  # what it makes of a parameter, it goes on with
                numbers = _on_numbers(func, args, kwargs)
                if not _shares(numbers, {one.hollow.untyped_storage()._cdata for one in known}):
                    return numbers
            try:
                result = func(*args, **kwargs)
            except NotImplementedError as error:
                if "meta tensor" not in str(error):
                    raise
                raise NotImplementedError(
                    "a deferred model has no numbers to move or read before the Trainer has divided it: build it on "
                    'its device (with torch.device("cuda"): model = hocket.deferred(build)), and read after that'
                ) from error
            if not known:
                return result
            storages = {one.untyped_storage()._cdata for one in known}

            def is_view(one: Any) -> bool:
                return _shares(one, storages) and all(one is not other for other in given)

            if not any(map(is_view, tree_leaves(result))):
                return result
            views = iter(tree_leaves(_on_numbers(func, args, kwargs) if numbers is None else numbers))
            return tree_map(lambda one: _view(one, next(views), known[0]) if is_view(one) else next(views), result)


class DeferredParameter(DeferredValue, nn.Parameter):
    """A parameter of a model that `hocket.deferred` has made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a parameter with the numbers that this one is to have."""
        if id(self) not in memo:
            made = self.numbers(torch.Tensor.clone)
            memo[id(self)] = deferred_parameter(nn.Parameter(made, self.requires_grad), self.ledger)
        return memo[id(self)]

    def numbers(self, function: Any, *args: Any) -> torch.Tensor:
        """Return what a function makes of the numbers; it has no memory yet, either."""
        self.ledger.adopts = True
        try:
            with self.ledger, torch.no_grad():
                made: torch.Tensor = function(self.hollow.detach(), *args)
                return made
        finally:
            self.ledger.adopts = False


def deferred_parameter(hollow: nn.Parameter, ledger: Any) -> DeferredParameter:
    """Return what a program sees of a tensor that a ledger fills."""
    with torch._C.DisableTorchFunctionSubclass():
        made = DeferredParameter(torch.empty_like(hollow, device="meta").detach(), hollow.requires_grad)
    made.hollow, made.ledger = hollow, ledger
    return made


def _set_data(parameter: DeferredParameter, value: torch.Tensor) -> None:
    """Give a parameter other data: another type, as `Module.double` does, or other numbers."""
    if value.dtype != parameter.dtype or value.is_meta:
        torch.Tensor.data.__set__(parameter, torch.empty_like(value, device="meta"))  # type: ignore[attr-defined]
    if parameter.dtype != parameter.hollow.dtype:
        parameter.hollow = nn.Parameter(parameter.numbers(torch.Tensor.to, parameter.dtype), parameter.requires_grad)
    if not value.is_meta:
        with torch.no_grad():
            _on_numbers(torch.Tensor.copy_, (parameter, value), {})


def _view(one: torch.Tensor, hollow: torch.Tensor, base: DeferredValue) -> DeferredValue:
    made = one.as_subclass(DeferredValue)
    made.hollow, made.ledger = hollow, base.ledger
    return made


def _shares(tree: Any, storages: set[int]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in storages for one in tree_leaves(tree))


def _writes(func: Any, kwargs: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    name = str(getattr(func, "__name__", ""))
    if kwargs.get("out") is not None or name in _IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES


def _written(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    name = str(getattr(func, "__name__", func))
    lost = [one for one in given if one.is_meta and not hasattr(one, "hollow")]
    if lost or name in _REFUSED:
        what = f"{name} has numbers of other tensors that are not there yet" if lost else f"{name} changes its memory"
        raise RuntimeError(
            f"a deferred parameter cannot be changed so: {what}. Do it in the function that hocket.deferred is given, "
            "where it is done to one tensor at a time"
        )
    result = _on_numbers(func, args, kwargs)
    shown = {id(one.hollow): one for one in given if isinstance(one, DeferredValue)}
    return tree_map(lambda one: shown.get(id(one), one), result)


def _on_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function gives for the tensors with numbers, which are in memory meanwhile."""
    ledgers = {
        id(one.ledger): one.ledger for one in tree_leaves((args, kwargs)) if isinstance(one, DeferredValue)
    }  # in which each is entered once

    def numbers(one: Any) -> Any:
        return one.hollow if isinstance(one, DeferredValue) else one

    with ExitStack() as entered:
        for ledger in ledgers.values():
            entered.enter_context(ledger)
        return func(*tree_map(numbers, args), **tree_map(numbers, kwargs))
