"""Looks at torch functions while a divided model runs: each call is made on slabs, by a rule, or on whole tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from hocket.workload.division import function_name

from ...batches import mapped, tensors_in
from . import _convolutions, _elementwise, _norms, _pools, _reductions, _resample, _shapes
from ._register import RULES
from ._site import CannotDivide, Groups, Site, note, noted

# Whose import has registered the rules.
_ = (_convolutions, _elementwise, _norms, _pools, _reductions, _resample, _shapes)

_ASKING = """
dim ndimension is_floating_point is_complex is_contiguous element_size get_device data_ptr stride storage_offset
is_signed requires_grad_ register_hook retain_grad hash repr format untyped_storage backward
is_inference is_same_size is_shared is_pinned register_post_accumulate_grad_hook
"""
_ASK = frozenset(_ASKING.split())
"""What asks about a tensor, or acts on this rank's own; sizes are answered by rules."""

Listener = Callable[[str, Any, str, str], None]
"""Hears of a call: function, arguments, what became of it, and why."""

_local = threading.local()


class Interpreter(TorchFunctionMode):
    """While it is entered, calls with slabs are made as if they were with full tensors.

    Args:
        groups: the ranks.
        listener: hears of each call that has a weight or a halo, and of each tensor that is gathered.
    """

    def __init__(self, groups: Groups, listener: Listener) -> None:
        super().__init__()
        self._groups = groups
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        divided = any(noted(one) is not None for one in tensors_in((args, kwargs)))
        raw: str = getattr(func, "__name__", "")
        name = function_name(func)
        if not divided and name != "batch_norm":
            return func(*args, **kwargs)
        if name in _ASK or (name.startswith("get_") and name not in ("get_shape", "get_data", "get_T", "get_mT")):
            return func(*args, **kwargs)
        site = Site(func, name, self._groups, lambda form, why: self._listener(name, (args, kwargs), form, why))
        site.in_place = _changes(raw, kwargs)
        if name == "get_data":
            return note(func(*args, **kwargs), noted(args[0]))
        made = RULES.get(name)
        why = "it has no rule for slabs"
        if made is not None:
            try:
                result = made(site, *args, **kwargs)
                self._listener(name, (args, kwargs), "divided", "")
                return result
            except CannotDivide as error:
                why = str(error)
        if site.in_place:
            raise NotImplementedError(
                f"{raw} cannot be made on a tensor that is divided among ranks ({why}): write it so that it makes a "
                "new tensor"
            )
        self._listener(name, (args, kwargs), "gathered", why)
        args, kwargs = mapped((args, kwargs), site.whole)
        return func(*args, **kwargs)


def _changes(raw: str, kwargs: Any) -> bool:
    """Whether a function changes its first argument."""
    if raw.startswith("__"):
        return raw == "__setitem__" or (raw.startswith("__i") and raw not in ("__invert__", "__index__", "__int__"))
    return raw.endswith("_") or kwargs.get("out") is not None or kwargs.get("inplace") is True


def running() -> bool:
    """Whether this thread is interpreting already."""
    return bool(getattr(_local, "running", False))


@contextmanager
def interpreting(groups: Groups, listener: Listener) -> Iterator[None]:
    """In the block torch functions are looked at; a block inside another changes nothing."""
    if running():
        yield
        return
    _local.running = True
    try:
        with Interpreter(groups, listener):
            yield
    finally:
        _local.running = False
